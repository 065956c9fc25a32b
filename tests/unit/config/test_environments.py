"""Warnings of the plan about environments."""

from __future__ import annotations

import re

import pytest

from roll.errors import ConfigError
from tests.faults import coded
from tests.unit.config.test_examples import planned

LAKE = "environments.frozen_lake"


@pytest.mark.parametrize(
    ("words", "turns", "steps"),
    [
        ((), None, None),
        ((f"{LAKE}.max_turns=7",), None, None),
        ((f"{LAKE}.max_turns=3",), 3, 4),
        ((f"{LAKE}.environment_args.max_steps=12",), 4, 12),
        ((f"~{LAKE}.environment_args.max_steps",), 4, 10),  # the environment's own default
        ((f"{LAKE}.environment=sokoban", f"~{LAKE}.environment_args.max_steps", f"{LAKE}.max_turns=19"), 19, 20),
        ((f"{LAKE}.environment=sokoban", f"~{LAKE}.environment_args.max_steps", f"{LAKE}.max_turns=20"), None, None),
        (("environments={sums: {environment: code_repl, rows: 4, max_turns: 3}}", "validation.rows={sums: 4}"), 3, 4),
        ((f"{LAKE}.environment='my.worlds:Lake'", f"{LAKE}.max_turns=3"), None, None),  # one turn may be several steps
    ],
)
def test_unreachable_environment_steps_warn(words: tuple[str, ...], turns: int | None, steps: int | None) -> None:
    _, plan = planned("tiny/tiny_frozen_lake", *words)
    said = [warning for warning in plan.warnings if "max_turns" in warning]
    assert len(said) == (turns is not None)
    if said:
        assert re.fullmatch(
            rf"environments\.\w+\.max_turns: .* {turns} turns, .* {steps} steps \(max_steps\)"
            rf".*; set max_turns={steps}, .* environment_args\.max_steps",
            said[0],
        )


@pytest.mark.parametrize(
    ("words", "is_fault"),
    [
        (("rewards={froze_lake: {reward: exact_match}}",), True),
        (("rewards={frozen_lake: {reward: exact_match}}",), False),
        (("rewards={sums: {reward: exact_match}}", "+actor_train.data_args.file_name=rows.jsonl"), False),
        (("rewards={sums: {reward: exact_match}}", "+validation.data_args.file_name=rows.jsonl"), False),
    ],
)
def test_a_reward_without_tasks_is_refused(words: tuple[str, ...], is_fault: bool) -> None:
    found = []
    try:
        planned("tiny/tiny_frozen_lake", *words)
    except ConfigError as error:
        found = coded(error.faults)
    assert (("owner_missing", "rewards.froze_lake") in found) == is_fault
    assert ("owner_missing", "rewards.sums") not in found
