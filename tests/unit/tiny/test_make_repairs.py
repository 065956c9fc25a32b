"""The tiny agent's repositories: what the warm-up says of them is what a container says, and right repairs are paid."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from examples.tiny import demo
from examples.tiny.make_image import write_machine_image
from examples.tiny.make_model import AGENT_POSITIONS, build_tokenizer
from examples.tiny.make_repairs import (
    HELD_OUT,
    LOOK,
    NOTHING,
    TRAIN,
    Repository,
    conversation,
    guess,
    repositories,
    row,
    write_repairs,
)
from roll.agents.containers.container import ContainerBounds, ContainerSettings
from roll.agents.containers.pool import Containers
from roll.agents.environments.shell import Shell
from roll.config.schema.rlvr import RlvrConfig
from tests import limits
from tests.unit.tiny.test_experiments import load

RLVR = demo.HERE / "tiny_repairs.yaml"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each file."""
    folder = tmp_path_factory.mktemp("tiny") / "repairs"
    write_repairs(folder, 0)
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}


def test_no_held_out_repository_is_seen(written: dict[str, list[dict[str, Any]]]) -> None:
    held_out, train = ([one["files"]["f.py"] for one in written[name]] for name in ("validation", "train"))
    assert (len(set(held_out)), len(set(train))) == (HELD_OUT, TRAIN) and not set(held_out) & set(train)
    told = [one["messages"][2]["content"] for one in written["conversations"]]
    told = [text for text in told if text != NOTHING]
    assert told and not {text.split("\n")[0] + "\n" for text in told} & set(held_out)


def test_episodes_fit_the_experiment(written: dict[str, list[dict[str, Any]]]) -> None:
    config = load(RLVR)
    assert isinstance(config, RlvrConfig) and config.sequence_length is not None
    tokenizer = build_tokenizer(agent=True)
    longest = max(
        len(tokenizer.apply_chat_template(one["messages"], return_dict=False)) for one in written["conversations"]
    )
    assert longest <= config.sequence_length <= AGENT_POSITIONS
    assert max(len(one["messages"][-1]["content"]) for one in written["conversations"]) < config.response_length


def test_few_conversations_are_right() -> None:
    """The warm-up shows the right repair in about an eighth of its episodes, always after a look at the test."""
    draw = random.Random(1)
    some = list(itertools.islice(repositories(draw, set(), False), 2000))
    assert not any(guess(one, draw) == one.repair for one in some)
    ends = [(said[1]["content"], said[-1]["content"]) for one in some if (said := conversation(one, draw)["messages"])]
    right = [first for one, (first, last) in zip(some, ends, strict=True) if last == one.repair]
    assert 0.09 < len(right) / len(some) < 0.15 and set(right) == {LOOK}
    assert not any(first == one.repair for one, (first, _) in zip(some, ends, strict=True))


@pytest.mark.full
def test_containers_say_what_the_warm_up_teaches(tmp_path: Path) -> None:
    """Of each kind of bug some repositories: the right repair is paid, another is not, nor is a module that exits."""
    write_machine_image(tmp_path / "image", with_python=True)
    settings = ContainerSettings(str(tmp_path / "image"), bounds=ContainerBounds(), cache=str(tmp_path / "cache"))
    section = load(RLVR).environments["repairs"]  # type: ignore[union-attr]
    keys = {**section.environment_args, "command_seconds": limits.CALL, "verify_seconds": limits.CALL}

    async def play(pool: Containers, one: Repository, commands: tuple[str, str]) -> tuple[str, float]:
        world = Shell(pool, **keys)
        try:
            await world.reset(row(one), 0)
            first, last = [await world.step({"role": "assistant", "content": command}) for command in commands]
            return first.messages[0]["content"], last.reward
        finally:
            await world.close()

    async def play_all() -> None:
        pool, draw = Containers(settings), random.Random(2)
        for one in itertools.islice(repositories(draw, set(), False), 16):
            assert await play(pool, one, (LOOK, one.repair)) == (one.said, 1.0), one
            said, _ = await play(pool, one, (guess(one, draw), LOOK))
            assert said == NOTHING
            for wrong in ("sed -i 's/def/fed/' f.py", "echo 'raise SystemExit(0)' > f.py", "rm f.py"):
                assert await play(pool, one, (LOOK, wrong)) == (one.said, 0.0), (one, wrong)
        await pool.close()

    asyncio.run(play_all())
