"""Incomplete or contradictory held-out sets and group filters are refused with place, value and remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from roll.errors import Fault, FaultCode
from tests.bad_input.test_contradictions import ONE
from tests.faults import assert_fault

SETS = "+validation={sets: {held: {data_args: {file_name: train.jsonl, prompt: prompt}}}}"
GREEDY = "+validation.sets.held.generating_args={temperature: 0, num_return_sequences: 2}"
FILTER = "rewards.math_rule.query_filter_config"
BOUNDS = f"{FILTER}.filter_args"
CASES = [
    (
        ["+validation={name: a}"],
        "validation.data_args",
        "missing",
        "validation.sets",
        "several sets",
    ),
    (
        [SETS, "+validation.data_args={file_name: a.jsonl, prompt: p}"],
        "validation.data_args",
        "exclusive",
        "and so is validation.sets",
        "one of the sets",
    ),
    ([SETS, "+validation.name=a"], "validation.name", "exclusive", "and so is validation.sets", "one of the sets"),
    (
        [SETS, "validation.sets.held.data_args.messages=m"],
        "validation.sets.held.data_args.prompt",
        "exclusive",
        "messages is 'm'",
        "one of the two",
    ),
    (
        [SETS, "+validation.sets.held.generating_args={max_new_tokens: 9}"],
        "validation.sets.held.generating_args.max_new_tokens",
        "too_large",
        "9",
        "8",
    ),
    (
        [SETS, GREEDY],
        "validation.sets.held.generating_args.num_return_sequences",
        "no_effect",
        "2, but temperature is 0",
        "above 0",
    ),
    ([SETS.replace("held", "a b")], "validation.sets.a b", "malformed", '"a b"', "a string of the form"),
    ([f"{FILTER}.type=mean_filter"], BOUNDS, "missing", "has no bound", "threshold_down or threshold_up"),
    (
        [f"{FILTER}.type=std_filter", f"{BOUNDS}.threshold_up=1"],
        f"{BOUNDS}.threshold_up",
        "unread",
        "1, but the type std_filter",
        "remove it",
    ),
    (
        [f"{FILTER}.type=no_filter", f"{BOUNDS}.std_threshold=0.5"],
        f"{BOUNDS}.std_threshold",
        "unread",
        "0.5, but the type no_filter",
        "remove it",
    ),
    (
        [f"{FILTER}.type=mean_filter", f"{BOUNDS}.threshold_up=0.1", f"{BOUNDS}.threshold_down=0.9"],
        f"{BOUNDS}.threshold_down",
        "not_below",
        "0.9 is not below threshold_up 0.1",
        "set it below threshold_up",
    ),
    (
        [*ONE, f"{FILTER}.type=std_filter", f"{BOUNDS}.std_threshold=0"],
        FILTER,
        "no_effect",
        "num_return_sequences_in_group is 1",
        "at least 2",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "place", "code", "value", "remedy"), CASES, ids=[case[0][-1][:60] for case in CASES]
)
def test_it_is_refused(
    faults_of: Callable[..., tuple[Fault, ...]],
    overrides: list[str],
    place: str,
    code: FaultCode,
    value: str,
    remedy: str,
) -> None:
    assert_fault(faults_of(*overrides), place, code, value, remedy)
