"""Warnings of the plan about environments."""

from __future__ import annotations

import re

import pytest

from roll.errors import ConfigError, Fault
from tests.faults import coded
from tests.unit.config.test_examples import planned

LAKE = "environments.frozen_lake"
OF_FILES = ("+actor_train.data_args={file_name: sums.jsonl, messages: messages}", "~validation", "eval_steps=0")
"""Words for an experiment whose tasks are in a data file."""


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
        ((*OF_FILES, "environments={sums: {environment: code_repl, max_turns: 3}}"), 3, 4),
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


def faults_of(*words: str) -> dict[str, Fault]:
    with pytest.raises(ConfigError) as refused:
        planned("tiny/tiny_frozen_lake", *words)
    return {fault.place: fault for fault in refused.value.faults}


@pytest.mark.parametrize("environment", ["tool_use", "critique", "shell", "code_repl"])
def test_generated_rows_without_a_task_are_refused(environment: str) -> None:
    keys = f"environment: {environment}, rows: 4, partners: {{critic: {{type: live}}}}"
    found = faults_of(f"environments={{sums: {{{keys}}}}}", "+rewards={sums: {reward: math_rule}}", "~validation")
    assert found["environments.sums.rows"].code == "contradiction"
    assert "data file" in found["environments.sums.rows"].remedy
    found = faults_of(
        *OF_FILES[:1], f"environments={{sums: {{environment: {environment}}}}}", "validation.rows={sums: 4}"
    )
    assert found["validation.rows.sums"].code == "contradiction"


def test_tags_without_a_data_file_are_refused() -> None:
    found = faults_of(f"{LAKE}.tag_included=[lake]")
    assert found[f"{LAKE}.tag_included"].code == "no_effect"
    planned("tiny/tiny_frozen_lake", f"{LAKE}.tag_included=[lake]", *OF_FILES[:1])
