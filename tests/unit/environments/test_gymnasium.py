"""Environments of Gymnasium are played by text; the package itself is the oracle of what they return."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from roll.agents.environments.base import Observation, Step
from roll.agents.environments.gymnasium import Gymnasium
from roll.api import load_config
from roll.config.load import on_disk
from roll.errors import ConfigError, EnvironmentFailed, Fault
from roll.runs.rlvr.environment_trial import try_environments
from tests import limits
from tests.faults import assert_fault
from tests.unit.environments.running import process, says, section

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
HERE = "tests.unit.environments.gym_worlds"
WORDS, DOORS, TAXI = f"{HERE}:GymWorlds/Words-v0", f"{HERE}:GymWorlds/Doors-v0", "Taxi"
DIRECTIONS = ("South", "North", "East", "West", "Pickup", "Dropoff")


def played(row: Mapping[str, Any], *texts: str, seed: int = 3, **keys: Any) -> tuple[Observation, list[Step]]:
    """Play an environment in this process, and close it."""
    world = Gymnasium(**keys)
    try:
        return world.reset(row, seed), [world.step(says(text)) for text in texts]
    finally:
        world.close()


def text_of(seen: Observation | Step) -> str:
    return str(seen.messages[-1]["content"])


def test_an_episode_is_that_of_the_package() -> None:
    own = gymnasium.make(TAXI, render_mode="ansi")
    own.reset(seed=11)
    drawn, rewards, moves = [own.render()], [], [3, 1, 0, 4, 5, 2, 2, 0]
    for move in moves:
        rewards.append(own.step(move)[1])
        drawn.append(own.render())
    own.close()
    keys = {"env_id": TAXI, "env_kwargs": {"render_mode": "ansi"}, "actions": DIRECTIONS, "observe": "render"}
    first, steps = played({}, *(DIRECTIONS[move] for move in moves), seed=11, env_instruction="", **keys)
    assert [text_of(one) for one in (first, *steps)] == drawn
    assert [step.reward for step in steps] == rewards and len(set(rewards)) > 1
    assert [one.state for one in (first, *steps)] == drawn


def test_equal_seeds_begin_equal_and_others_differ() -> None:
    begins = [text_of(played({}, env_id=WORDS, seed=seed)[0]) for seed in (3, 3, 4)]
    assert begins[0] == begins[1] != begins[2]


def test_a_text_is_an_action() -> None:
    first, steps = played({"word": "apple"}, " pear\n", "apple", env_id=WORDS, reset_columns=["word"])
    assert text_of(first) == "Say apple"
    assert [(step.reward, step.done) for step in steps] == [(0.0, False), (1.0, True)]
    assert text_of(steps[0]) == "You said pear" and not steps[1].messages


@pytest.mark.parametrize(
    ("keys", "right", "wrong"),
    [
        ({"env_id": WORDS}, "1", "too long to say"),
        ({"env_id": DOORS}, "6", "8"),
        ({"env_id": DOORS, "actions": ["left", "middle", "right"]}, "MIDDLE", "6"),
        ({"env_id": DOORS, "action_pattern": "<answer>(.*?)</answer>"}, "so <answer> 7 </answer>", "7"),
    ],
)
def test_unreadable_actions_leave_the_environment_alone(keys: dict[str, Any], right: str, wrong: str) -> None:
    first, steps = played({}, wrong, right, wrong, format_penalty=-0.25, **keys)
    assert [step.reward for step in steps] == [-0.25, 0.0 if keys["env_id"] == WORDS else 0.5, -0.25]
    assert [step.metrics.get("invalid_actions", 0.0) for step in steps] == [1.0, 0.0, 1.0]
    assert [step.state == first.state for step in steps] == [True, False, False]
    assert steps[2].state == steps[1].state and text_of(steps[2]).endswith(f"\n{steps[1].state}")


@pytest.mark.parametrize(
    ("observe", "first", "second"),
    [
        ("observation", '{"tries": 0, "word": "closed"}', '{"tries": 1, "word": "closed"}'),
        (f"{HERE}:shown", "After 0 tries, with []", "After 1 tries, with ['success']"),
    ],
)
def test_what_the_policy_sees(observe: str, first: str, second: str) -> None:
    begun, [step] = played({}, "6", env_id=DOORS, observe=observe, agent_system_template="Open it.")
    assert [message["role"] for message in begun.messages] == ["system", "user"]
    assert text_of(begun) == f"Your available actions are: 5, 6, 7.\n{first}"
    assert text_of(step) == second == step.state


def test_terminated_and_truncated_are_kept_apart() -> None:
    keys = {"env_id": DOORS, "env_kwargs": {"max_episode_steps": 2}, "info_metrics": ["success"]}
    ended = [played({}, *texts, **keys)[1][-1] for texts in (["5"], ["6", "7"])]
    assert [step.done for step in ended] == [True, True]
    assert [step.metrics for step in ended] == [
        {"terminated": 1.0, "truncated": 0.0, "success": 1.0},
        {"terminated": 0.0, "truncated": 1.0, "success": 0.0},
    ]


def test_a_metric_that_never_comes_fails() -> None:
    with pytest.raises(ValueError, match="info has no 'sucess'"):
        played({}, "5", env_id=DOORS, info_metrics=["sucess"])


@pytest.mark.parametrize(
    ("keys", "error", "problem"),
    [
        ({"env_id": WORDS, "env_kwargs": {"spoken": False}}, ValueError, "the action space is Box"),
        ({"env_id": WORDS, "actions": ["a"]}, ValueError, "whose actions are texts"),
        ({"env_id": DOORS, "actions": ["a", "A", "b"]}, ValueError, "needs 3 different"),
        ({"env_id": DOORS, "actions": ["a", "b"]}, ValueError, "actions has 2 names"),
        ({"env_id": DOORS, "observe": "rendered"}, ValueError, "observe is 'rendered'"),
        ({"env_id": DOORS, "action_pattern": "("}, ValueError, "not a regular expression"),
        ({"env_id": DOORS, "reset_columns": ["word"]}, ValueError, "has no 'word'"),
        ({"env_id": TAXI, "observe": "render"}, ValueError, "set env_kwargs.render_mode"),
        ({"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": "no"}}, ValueError, "is_slippery is the text 'no'"),
        ({"env_id": "Taxy-v4"}, gymnasium.error.Error, "Taxy"),
    ],
)
def test_unusable_keys_are_refused(keys: dict[str, Any], error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        played({"name": "ada"}, **keys)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_exception_fails_the_episode_and_closes(where: str, tmp_path: Path) -> None:
    mark = tmp_path / "closed"

    async def play() -> None:
        args = {"env_id": WORDS, "env_kwargs": {"fail": where, "mark": str(mark)}}
        async with process(environment="gymnasium", environment_args=args) as environments:
            with pytest.raises(EnvironmentFailed, match=f"{where} failed: KeyError"):
                await environments.open(0, {}, 5)
                await environments.step(0, says("1"))
            await environments.end(0)

    asyncio.run(play())
    assert mark.read_text() == "closed"


def faults(**args: Any) -> list[Fault]:
    domain = section(environment="gymnasium", environment_args=args)
    return asyncio.run(try_environments({"act": domain}, {"act": {"seed": 1}}, limits.START, lambda _: ""))


def test_trial_refuses_what_cannot_be_played() -> None:
    assert faults(env_id=TAXI, actions=list(DIRECTIONS)) == []
    [fault] = faults(env_id=TAXI, actions=["North"])
    assert (fault.place, fault.code) == ("environments.act.environment", "failed") and "has 1 names" in fault.problem
    [fault] = faults(env_id=TAXI, env_idd=TAXI)
    assert (fault.place, fault.code) == ("environments.act.environment_args", "unfit") and "env_idd" in fault.problem


def test_trial_finds_environments_that_ignore_the_seed() -> None:
    # FrozenLake draws a map without a name when it is made, which a seed does not reach.
    lake = {"env_id": "FrozenLake-v1", "observe": "render", "env_kwargs": {"map_name": None, "render_mode": "ansi"}}
    [fault] = faults(**lake)
    assert (fault.place, fault.code) == ("environments.act.environment", "unfit") and "seed" in fault.remedy
    assert faults(**{**lake, "env_kwargs": {"map_name": "4x4", "render_mode": "ansi"}}) == []


def test_a_missing_package_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = on_disk.find_spec
    monkeypatch.setattr(on_disk, "find_spec", lambda name: None if name == "gymnasium" else there(name))
    monkeypatch.chdir(tmp_path)
    keys = "+environments={doors: {environment: gymnasium, environment_args: {env_id: Taxi-v4}, rows: 4}}"
    with pytest.raises(ConfigError) as caught:
        load_config("tiny/tiny_agent", [keys, "~environments.calculator", "~validation"])
    assert_fault(
        caught.value.faults, "environments.doors.environment", "not_installed", "gymnasium", "pip install 'gymnasium"
    )
