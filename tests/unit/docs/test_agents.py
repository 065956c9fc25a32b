"""Runs the agent of `docs/agents.md` through the gateway, and compares the limits on the page with the code."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import yaml

from roll.agents.environments.base import Step
from roll.agents.environments.process import EnvironmentProcess
from roll.agents.episodes import MOST_ASKED
from roll.agents.gateway.agent import MOST_OUTPUT, command_for
from roll.agents.gateway.episodes import GRACE_SECONDS
from roll.agents.gateway.server import BODY_SECONDS
from roll.agents.gateway.session import ABANDONED_SECONDS
from roll.config.derived.fixed_roles import TEMPLATE_TOKENS
from roll.config.schema.environments import EnvironmentConfig
from roll.runs.rlvr.environment_trial import agent_faults
from tests import limits
from tests.unit.docs.pages import blocks, read
from tests.unit.environments.running import says
from tests.unit.gateway.asking import check_exact, laid
from tests.unit.gateway.serving import run
from tests.unit.gateway.test_agents import episode
from tests.unit.rollout.playing import Engine, World, Worlds

PAGE = "docs/agents.md"


@pytest.mark.parametrize("module", ["my_agent", "my_other_agent"])
def test_the_agent_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    [code] = [block for block in blocks(PAGE) if block.option("file") == f"{module}.py"]
    (tmp_path / f"{module}.py").write_text(code.text, encoding="utf-8")
    [keys] = [
        found
        for block in blocks(PAGE)
        if "agent:" in block.text and (found := yaml.safe_load(block.text)["environments"])
    ]
    section = EnvironmentConfig.model_validate({**keys["calculator"], "agent": {"function": f"{module}:play"}})
    assert keys["calculator"]["agent"] == {"function": "my_agent:play"}
    assert not list(agent_faults({"calculator": section}, limits.START)) and section.agent is not None
    says, world = iter(["I think 7", "7, sure"]), World([Step(reward=1.0, done=True)])
    engine = Engine(lambda _: next(says), takes=0)
    found = run(episode(command_for(section.agent), Worlds(lambda: world), engine))
    assert laid(found) == [["user:go|assistant:", "I think 7|", "user:Are you sure?|assistant:", "7, sure|"]]
    assert found.reward.value == 1 and [message["content"] for message in world.heard] == ["7, sure"]
    check_exact(found, engine)


def test_the_bargain_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    [code] = [block for block in blocks(PAGE) if block.option("file") == "my_bargain.py"]
    (tmp_path / "my_bargain.py").write_text(code.text, encoding="utf-8")
    [keys] = [yaml.safe_load(block.text)["environments"] for block in blocks(PAGE) if "seller:" in block.text]
    section = EnvironmentConfig.model_validate_json(json.dumps(keys["bargain"]))

    async def play() -> list[Step]:
        process = EnvironmentProcess("bargain", section, limits.START)
        try:
            await process.open(0, {"seed": 3}, 0)
            turns = [("45?", "No, 60."), ("55!", "DEAL: 55, then.")]
            return [
                step
                for said, answer in turns
                for step in (await process.step(0, says(said)), await process.hear(0, "seller", answer))
            ]
        finally:
            await process.close()

    first, no, second, deal = asyncio.run(play())
    assert first.asks is not None and [one["role"] for one in first.asks.messages] == ["system", "user"]
    assert no.messages == [{"role": "user", "content": "No, 60."}] and not no.done
    assert second.asks is not None and second.asks.messages[1:] == [
        {"role": "user", "content": "45?"},
        {"role": "assistant", "content": "No, 60."},
        {"role": "user", "content": "55!"},
    ]
    assert deal.done and deal.reward == pytest.approx(0.45) and deal.metrics == {"deals": 1.0}


def test_the_page_has_the_bounds_as_they_are() -> None:
    text = read(PAGE)
    assert f"{MOST_ASKED} times in" in text and f"{TEMPLATE_TOKENS:,} further" in text
    assert (
        f"{MOST_OUTPUT >> 20} MiB of output" in text
        and f"arrive within {BODY_SECONDS:g} s" in text
        and f"has {GRACE_SECONDS:g} s to exit" in text
        and f"sampled for another {ABANDONED_SECONDS:g} s" in text
    )
