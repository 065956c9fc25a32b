"""The curriculum in the configuration: refused settings, with place, code, value and remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from roll.errors import Fault, FaultCode
from tests.faults import assert_fault

OWN = "curriculum"
FAULTS: list[tuple[list[str], str, FaultCode, str, str]] = [
    (["+curriculum={hard_at_most: 0.9}"], f"{OWN}.hard_at_most", "contradiction", "0.9", "below solved_at_least"),
    (["+curriculum={hard_at_most: 1, solved_at_least: 0}"], f"{OWN}.hard_at_most", "contradiction", "1", "below"),
    (["+curriculum={hard_at_most: -0.1}"], f"{OWN}.hard_at_most", "out_of_range", "-0.1", "at least 0"),
    (["+curriculum={solved_at_least: 2}"], f"{OWN}.solved_at_least", "out_of_range", "2", "at most 1"),
    (["+curriculum={update_rate: 0}"], f"{OWN}.update_rate", "out_of_range", "0", "above 0"),
    (["+curriculum={update_rate: 1.5}"], f"{OWN}.update_rate", "out_of_range", "1.5", "at most 1"),
    (["+curriculum={shares: {unseen: 0}}"], f"{OWN}.shares.unseen", "out_of_range", "0", "above 0"),
    (["+curriculum={shares: {solved: -1}}"], f"{OWN}.shares.solved", "out_of_range", "-1", "at least 0"),
    (["+curriculum={shares: {hard: 0, learnable: 0, solved: 0}}"], f"{OWN}.shares", "no_effect", "all 0", "above 0"),
    (["+curriculum={shares: {easy: 1}}"], f"{OWN}.shares.easy", "unknown_key", "", ""),
    (["+curriculum={}", "replay_from=kept"], OWN, "no_effect", "'kept'", "remove one"),
]


@pytest.mark.parametrize(("words", "place", "code", "value", "remedy"), FAULTS, ids=lambda one: str(one)[:60])
def test_refused_with_place_value_and_remedy(
    words: list[str], place: str, code: FaultCode, value: str, remedy: str, faults_of: Callable[..., tuple[Fault, ...]]
) -> None:
    assert_fault(faults_of(*words), place, code, value, remedy)


@pytest.mark.parametrize(
    "words",
    [
        ["+curriculum={}"],
        ["+curriculum={hard_at_most: 0, solved_at_least: 1, update_rate: 1}"],
        ["+curriculum={shares: {hard: 0, solved: 0}}", "+dynamic_sampling={}", "async_generation_ratio=1.5"],
    ],
    ids=str,
)
def test_a_curriculum_is_accepted(words: list[str], faults_of: Callable[..., tuple[Fault, ...]]) -> None:
    assert faults_of(*words) == ()
