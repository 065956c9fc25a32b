"""Every row of a domain is checked by its reward before a run starts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll.config.schema.roles import RewardConfig
from roll.runs.rlvr import reward_trial
from roll.runs.rlvr.reward_trial import TRIED, RowProblem, try_rows, value_shape
from tests import limits
from tests.unit.rewards.running import PROMPT

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
MODULE = """
from roll.algorithms.methods import declares
from roll.rewards.base import RewardTraits


def reads(prompt, response, row):
    return float(row["solution"].strip() == response)


def key_of(row):
    if row["key"] == 3:
        raise ValueError("the key is 3")


@declares(RewardTraits(check_row=key_of))
def checked(prompt, response, row):
    raise AssertionError("rows are not tried with the reward")


@declares(RewardTraits(needs_service=True))
async def asks(prompt, response, row):
    raise ConnectionError("nobody listens")


@declares(RewardTraits(needs_service=True, check_row=key_of))
async def asks_by_key(prompt, response, row):
    raise ConnectionError("nobody listens")


def counts(prompt, response, row):
    with open(row["log"], "a") as file:
        file.write("x")
    return 0.0
"""
CASES = {"case_type": "input", "test_cases": [{"stdin": "1", "expected_stdout": "2"}]}
CHECK = {"func_name": "validate_no_commas"}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "row_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def problems(keys: dict[str, Any], rows: Sequence[dict[str, Any]], called: bool = True) -> list[RowProblem]:
    """Return the problems of rows. `called`: whether the first of them is called anyway, as in the first set."""
    section = RewardConfig.model_validate({"timeout": limits.CALL, **keys})
    prompts = [replace(PROMPT, row=row) for row in rows]
    shapes = {"own": value_shape(rows[0])} if called else {}
    return asyncio.run(try_rows({"own": section}, {"own": prompts}, limits.START, shapes)).get("own", [])


@pytest.mark.parametrize(
    ("reward", "good", "bad"),
    [
        (
            "math_rule",
            ["1", 7, 0.5, "\\frac{1}{2}", "work #### 4", "x=5", "$18"],
            [None, "", " ", [1], True, "####", "{{", "a {", {"a": 1}, "nan", "NaN", "None", "null", "#### N/A"],
        ),
        ("math_steps", ["1"], [None, "{{"]),
        (
            "exact_match",
            ["a", "{{", 0, "None"],
            [None, "", "work ####", ["a"], False, float("nan"), "nan", "#### <NA>"],
        ),
        ("right_prefix", ["a"], [None, ""]),
        ("multiple_choice", ["B", "(C)", "D) because"], [None, "", "12", "b"]),
        ("crossthinkqa", ["B", "the C"], [None, "", "12", "b"]),
        (
            "ifeval",
            [CHECK, '{"func_name": "validate_no_commas"}'],
            [None, "", "text", {"func_name": "nothing"}, {"N": 1}],
        ),
    ],
)
def test_a_shipped_reward_refuses_references_it_cannot_use(reward: str, good: list[Any], bad: list[Any]) -> None:
    rows = [*({"ground_truth": value} for value in good), {}, *({"ground_truth": value} for value in bad)]
    assert [one.index for one in problems({"reward": reward}, rows)] == [*range(len(good), len(rows))]


def test_an_answer_column_serves_without_a_ground_truth() -> None:
    rows = [
        {"answer": "1"},
        {"answer": "1", "ground_truth": ""},
        {"answer": "", "ground_truth": None},
        {"answer": "{{"},
    ]
    assert [one.index for one in problems({"reward": "math_rule"}, rows)] == [2, 3]


def test_a_sandbox_refuses_rows_without_test_cases() -> None:
    bad = [
        {},
        CASES | {"test_cases": []},
        CASES | {"test_cases": "["},
        CASES | {"case_type": None},
        CASES | {"test_cases": [{"stdin": ""}]},
    ]
    assert [one.index for one in problems({"reward": "code_sandbox"}, [CASES, *bad])] == [1, 2, 3, 4, 5]


def test_row_problem_uses_words_of_the_reward() -> None:
    [found] = problems({"reward": "math_rule"}, [{"ground_truth": "1"}, {"question": "1"}])
    assert (found.index, found.reward) == (1, "math_rule") and "'ground_truth' nor 'answer'" in found.problem


def test_each_part_judges_the_rows_and_is_named() -> None:
    parts = {"answer": {"reward": "exact_match"}, "form": {"reward": "ifeval"}, "short": {"reward": "length_penalty"}}
    found = problems({"parts": parts}, [{"ground_truth": CHECK}, {"ground_truth": "a"}])
    assert [(one.index, one.reward) for one in found] == [(0, "exact_match"), (1, "ifeval")]


def test_declared_row_check_replaces_the_reward() -> None:
    rows = [{"key": 1}, {"key": 3}, {"other": 1}]
    found = problems({"reward": "row_rewards:checked", "group": True}, rows)
    assert [one.index for one in found] == [1, 2]
    assert found[0].problem == "the key is 3" and found[1].problem.startswith("KeyError: 'key'")


def test_a_check_of_an_asynchronous_service_is_called() -> None:
    keys = {"reward": "row_rewards:asks_by_key", "concurrency": 8}
    assert [one.index for one in problems(keys, [{"key": 1}, {"key": 3}])] == [1]


def test_row_trial_skips_rewards_that_need_service() -> None:
    assert problems({"reward": "row_rewards:asks"}, [{"a": 1}, {"b": 1}]) == []


def test_reward_without_check_is_tried_per_shape() -> None:
    rows = [
        {"solution": "a"},
        {"solution": "b"},
        {"solution": None},
        {"solution": ""},
        {"solution": [1]},
        {},
        {"solution": None},
    ]
    found = problems({"reward": "row_rewards:reads"}, rows)
    assert [one.index for one in found] == [2, 6, 4, 5]
    assert "AttributeError: 'NoneType' " in found[0].problem and "'strip'" in found[0].problem


def test_first_row_of_a_later_set_is_tried() -> None:
    rows = [{"answer": "a"}, {"answer": "b"}]
    assert [one.index for one in problems({"reward": "row_rewards:reads"}, rows, called=False)] == [0, 1]
    assert problems({"reward": "row_rewards:reads"}, rows) == []


def test_each_further_shape_is_tried_once(tmp_path: Path) -> None:
    log = str(tmp_path / "calls")
    problems(
        {"reward": "row_rewards:counts"},
        [{"log": log, "a": number} for number in range(50)] + [{"log": log, "a": ""}] * 5,
    )
    assert (tmp_path / "calls").read_text() == "x" * len(TRIED)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ({"a": 1}, {"a": 2.5}, True),
        ({"a": 0}, {"a": 1}, True),
        ({"a": True}, {"a": 1}, False),
        ({"a": "x"}, {"a": ""}, False),
        ({"a": None}, {}, False),
        ({"a": {"b": "x"}}, {"a": {"b": None}}, False),
        ({"a": [1]}, {"a": []}, False),
        ({"b": 1, "a": 2}, {"a": 1, "b": 2}, True),
    ],
)
def test_shapes_tell_absent_empty_and_typed_values_apart(one: dict, other: dict, alike: bool) -> None:
    assert (value_shape(one) == value_shape(other)) is alike


def test_many_rows_are_checked_by_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_trial, "ROWS_OF_PROCESS", 2)
    monkeypatch.setattr(reward_trial, "AT_ONCE", 2)
    monkeypatch.setattr(reward_trial.os, "cpu_count", lambda: 3)
    bad = (0, 4, 6, 8)
    rows = [{"ground_truth": "" if index in bad else "1"} for index in range(9)]
    assert tuple(one.index for one in problems({"reward": "exact_match"}, rows)) == bad


def test_row_trial_skips_unloadable_reward() -> None:
    assert problems({"reward": "row_rewards:absent"}, [{"a": 1}]) == []
