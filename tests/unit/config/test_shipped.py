"""The tables of built-in rewards and environments are those that register, and say which rewards judge turns."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

import pytest

import roll.agents.environments
import roll.rewards.functions
from roll.agents.environments.base import ENVIRONMENTS
from roll.config.shipped import known_environments, known_rewards, rewards_with_turns
from roll.rewards.base import REWARDS, RewardFunction, load_reward
from roll.types import RewardResult, TurnReward
from tests.unit.rewards.running import PROMPT

RESPONSE = "1 + 1 = 2 and 2 + 2 = 4, so \\boxed{4}"
ROWS: dict[str, dict[str, Any]] = {
    "ifeval": {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    "crossthinkqa": {"ground_truth": "A"},
    "multiple_choice": {"ground_truth": "A"},
    "grounding": {"ground_truth": "[1, 2, 3, 4]"},
    "detection": {
        "ground_truth": '<answer>[{"bbox_2d": [1, 2, 3, 4], "label": "a"}]</answer>',
        "reward_model": {"verifier_parm": {"det_reward_ratio": {"map": 1.0}}},
    },
    "reasoning_gym": {"ground_truth": "4", "metadata": {"source_dataset": "chain_sum"}},
}
"""Rows of rewards that do not judge the row of a sum."""


def by_function(prompt: object, response: str, row: object) -> RewardResult:
    return RewardResult(1.0, turns=built(response))


def built(response: str) -> tuple[TurnReward, ...]:
    return (TurnReward(len(response), 1.0),)


def by_word(prompt: object, response: str, row: object) -> RewardResult:
    return RewardResult(1.0)  # no TurnReward( is made here


def judges_turns(reward: RewardFunction, row: dict[str, Any]) -> bool:
    """Return whether a reward assigns rewards to turns of the response to a sum."""
    return bool(reward(PROMPT, RESPONSE, row).turns)


def registered_after_imports(package: ModuleType, table: Any) -> set[str]:
    """Import every module of a package, and return the names that its table then has."""
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    return {name for name in table if table[name].__module__.startswith(package.__name__)}


def test_shipped_rewards_are_those_that_register() -> None:
    assert set(known_rewards()) == registered_after_imports(roll.rewards.functions, REWARDS)


def test_shipped_environments_are_those_that_register() -> None:
    assert set(known_environments()) == registered_after_imports(roll.agents.environments, ENVIRONMENTS)


@pytest.mark.parametrize("name", [name for name in known_rewards() if name != "code_sandbox"])
def test_rewards_with_turns_are_those_that_judge(name: str) -> None:
    if name == "reasoning_gym":
        pytest.importorskip(name)
    row = ROWS.get(name, {"ground_truth": "4"})
    assert judges_turns(load_reward(name), row) is (name in rewards_with_turns())


def test_turns_of_a_function_are_seen_not_comments() -> None:
    assert judges_turns(by_function, {}) and not judges_turns(by_word, {})
