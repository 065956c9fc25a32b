"""Environments of verifiers as agents, and rewards that agents report. A package in the place of verifiers plays the
episodes here; the real one was tried by hand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll.agents.episodes import EpisodeLimits
from roll.agents.gateway.agent import command_for
from roll.agents.gateway.episodes import Agent, AgentEpisodes
from roll.agents.gateway.server import Gateway, GatewayBounds
from roll.config.schema.environments import AgentConfig, EnvironmentConfig
from roll.runs.rlvr.environment_trial import agent_faults
from roll.types import Episode, Sampling, StopReason
from tests import limits
from tests.faults import coded
from tests.unit.gateway.asking import RESPONSE, SEQUENCE, check_exact, laid, turns
from tests.unit.gateway.serving import BODY_BYTES, LOOPBACK, run, served
from tests.unit.gateway.test_agents import ASKING, BOUNDS, children, python
from tests.unit.rollout.playing import DOMAIN, Chat, Engine, World, Worlds, task

PACKAGE = '''
import json, logging, os, urllib.request


class Rows(list):
    def to_list(self):
        return list(self)


class Environment:
    """Asks the policy `turns` times. The reward is the share of the answers that are the row's."""

    def __init__(self, turns=1, fails="", group=False):
        self.turns, self.fails, self.requires_group_rollouts = turns, fails, group

    def get_dataset(self):
        return Rows([{"prompt": [{"role": "user", "content": "one"}], "answer": "1", "info": {"n": 1}}])

    def get_eval_dataset(self):
        return Rows([{"prompt": [{"role": "user", "content": "two"}], "answer": "2", "info": None}])

    async def run_rollout(self, row, client, model, sampling_args):
        assert (model, sampling_args) == ("policy", {}) and set(row) == {"prompt", "answer", "example_id"}, row
        messages, said = list(row["prompt"]), []
        for _ in range(self.turns):
            headers = {"Authorization": "Bearer " + os.environ[client.api_key_var], "Content-Type": "application/json"}
            body = json.dumps({"model": model, "messages": messages}).encode()
            request = urllib.request.Request(client.api_base_url + "/chat/completions", body, headers)
            message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
            if not message["content"]:
                return self.output(row, said, error={"error": "EmptyModelResponseError"})
            said.append(message["content"])
            messages += [message, {"role": "user", "content": "again"}]
        error = {"error": "SandboxError", "error_chain_repr": "SandboxError('it is gone')"}
        return self.output(row, said, error if self.fails == "infrastructure" else None)

    def output(self, row, said, error=None):
        if self.fails == "reward":
            logging.getLogger("verifiers.rubrics.rubric.Rubric").error("Error calling reward function right")
        reward = sum(one == row["answer"] for one in said) / self.turns
        return {"reward": None if self.fails == "nothing" else reward, "metrics": {"said": len(said)}, "error": error}


def load_environment(env_id, **env_args):
    if env_id != "asking":
        raise ValueError(f"Could not import '{env_id}' environment")
    return Environment(**env_args)
'''
TYPES = """
class ClientConfig:
    def __init__(self, client_type, api_key_var, api_base_url):
        assert client_type == "openai_chat_completions"
        self.api_key_var, self.api_base_url = api_key_var, api_base_url
"""
ROW = {"prompt": [{"role": "user", "content": "go"}], "answer": "yes", "info": None}
REPORT = f"""{ASKING}
def report(body):
    headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/reward", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request)
ask([{{"role": "user", "content": "go"}}])
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a package in the place of verifiers."""
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "verifiers" / "types.py").write_text(TYPES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def agent(env_id: str = "asking", **env_args: Any) -> AgentConfig:
    keys = {"env_id": env_id, "env_args": env_args, "python": sys.executable}
    return AgentConfig.model_validate({"verifiers": keys})


def played(command: tuple[str, ...], engine: Engine, max_turns: int = 5) -> Episode:
    """Play an episode of an agent that reports its reward."""

    async def play() -> Episode:
        gateway, bounds = Gateway(GatewayBounds(BODY_BYTES, 8)), EpisodeLimits(max_turns, limits.CALL, 1)
        agents = {DOMAIN: Agent(command, {}, bounds, BOUNDS, reports_reward=True)}
        worlds = Worlds(lambda: World([]))
        async with gateway.listening(LOOPBACK, 0):
            player = AgentEpisodes(worlds, gateway, engine, Chat(), Sampling(RESPONSE), agents, SEQUENCE)
            episode = await player.play(replace(task(7), row=ROW), 5, 11)
        assert all(world.closed == 1 and not world.heard for world in worlds.opened)
        return episode

    before = children()
    found = run(play())
    assert children() <= before, "the agent left no process"
    return found


def answering(*texts: str) -> Engine:
    """Return a policy that gives these answers, one for each of its turns."""
    return Engine(lambda context: texts[context.count("assistant:") - 1], takes=0)


@pytest.mark.usefixtures("package")
def test_an_environment_of_verifiers_gives_the_reward() -> None:
    engine = answering("yes", "no")
    found = played(command_for(agent(turns=2)), engine)
    assert laid(found) == [["user:go|assistant:", "yes|", "user:again|assistant:", "no|"]]
    assert (found.stop, found.reward.value, found.metrics["environment/said"]) == (StopReason.COMPLETED, 0.5, 2.0)
    check_exact(found, engine)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("fails", "note"),
    [("infrastructure", "SandboxError('it is gone')"), ("reward", "reward function right"), ("nothing", "no reward")],
)
def test_broken_environments_and_rubrics_give_no_reward(fails: str, note: str) -> None:
    found = played(command_for(agent(fails=fails)), answering("yes"))
    assert found.stop is StopReason.ENVIRONMENT_FAILED and note in found.reward.note


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("fails", ["", "reward"])
def test_full_episodes_are_judged_by_what_was_said(fails: str) -> None:
    found = played(command_for(agent(turns=4, fails=fails)), answering("yes", "yes", "yes"), max_turns=2)
    assert (found.stop, found.reward.value) == (StopReason.MAX_TURNS, 0.5)


def test_verifiers_are_looked_at_before_anything_starts(package: Path) -> None:
    agents = {"there": agent(), "gone": agent("gone"), "several": agent(group=True)}
    sections = {name: EnvironmentConfig.model_validate({"agent": one}) for name, one in agents.items()}
    absent = {"env_id": "asking", "python": "/no/such/python"}
    sections["absent"] = EnvironmentConfig.model_validate({"agent": {"verifiers": absent}})
    faults = list(agent_faults(sections, limits.START))
    assert coded(faults) == [
        ("failed", "environments.gone.agent.verifiers"),
        ("failed", "environments.several.agent.verifiers"),
        ("not_found", "environments.absent.agent.verifiers.python"),
    ]
    assert "'gone'" in faults[0].problem and "of a group" in faults[1].problem and "/no/such" in faults[2].problem


@pytest.mark.parametrize(("split", "answer", "info"), [("train", "1", '{"n": 1}'), ("eval", "2", None)])
def test_rows_of_the_data_set_are_written(split: str, answer: str, info: Any, package: Path) -> None:
    subprocess.run([*command_for(agent()), "rows", "rows.jsonl", split], check=True, timeout=limits.PROCESS)
    [row] = map(json.loads, (package / "rows.jsonl").read_text().splitlines())
    assert (row["answer"], row["info"]) == (answer, info)


def test_an_agent_reports_its_reward() -> None:
    engine = Engine(turns(), takes=0)
    code = f"{REPORT}\nfor _ in range(2): report({{'reward': 0.25, 'metrics': {{'found': 1}}}})"
    found = played(python(code), engine)
    assert (found.reward.value, found.metrics["environment/found"]) == (0.25, 1.0)
    check_exact(found, engine)


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("", "without reporting a reward"),
        ("report({'reward': 1.0})\nsys.exit(3)", "status 3"),
        ("report({'reward': 1.0})\nreport({'reward': 0.0})", "the gateway refused a request: reward"),
        ("report({'reward': float('inf')})", "the gateway refused a request: reward"),
    ],
)
def test_an_agent_without_one_reward_is_broken(code: str, note: str) -> None:
    found = played(python(f"{REPORT}\nimport sys\n{code}"), Engine(turns(), takes=0))
    assert found.stop is StopReason.ENVIRONMENT_FAILED and note in found.reward.note, found.reward.note


def test_an_agent_that_is_full_may_report_late() -> None:
    late = f"import time\ntime.sleep({limits.EXPIRY})\nreport({{'reward': 0.5}})"
    code = f"{REPORT}\nask([{{'role': 'user', 'content': 'go on'}}])\n{late}"
    found = played(python(code), Engine(turns(), takes=0), max_turns=1)
    assert (found.stop, found.reward.value) == (StopReason.MAX_TURNS, 0.5)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({}, "reward"),
        ({"reward": True}, "reward"),
        ({"reward": "1"}, "reward"),
        ({"reward": 1.0, "metrics": {"found": "yes"}}, "reward"),
        ({"reward": 1.0, "rewards": 2.0}, "rewards"),
        ({"reward": 1.0}, "reward"),
    ],
)
def test_unusable_reports_are_refused(body: Mapping[str, Any], place: str) -> None:
    """The last one is that of an agent whose environment gives the reward."""

    async def post() -> Any:
        async with served(Engine(turns(), takes=0)) as one:
            one.session.may_report = body != {"reward": 1.0}
            answer = await one.client._client.post("reward", json=body, headers={"Authorization": f"Bearer {one.key}"})
            return answer.status_code, answer.json()["error"]["param"], one.session.reported

    assert run(post()) == (400, place, None)
