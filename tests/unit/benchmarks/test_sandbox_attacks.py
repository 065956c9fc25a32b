"""The programs that attack the sandbox find what gets through, and repeat their attempts by the seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import sandbox_forgeries as forgeries
from benchmarks import sandbox_resources as resources
from benchmarks.sandbox_calls import RESOURCES
from benchmarks.sandbox_comparisons import COMPARISONS
from roll.rewards.sandbox.program import CaseEnd, Outcome


def test_there_are_enough_attempts() -> None:
    assert len(RESOURCES) >= 25 and len(COMPARISONS) >= 20
    for resource in RESOURCES:
        made = resources.attempts_on(resource, 10, 0)
        assert len({attempt.source for attempt in made}) == len(made) >= 10
    for comparison in COMPARISONS:
        assert len(set(forgeries.attempts_on(comparison, 30, 0))) == 30


def test_the_seed_determines_the_attempts() -> None:
    for seed, same in ((3, True), (4, False)):
        assert (resources.attempts_on(RESOURCES[0], 12, 3) == resources.attempts_on(RESOURCES[0], 12, seed)) is same
        assert (forgeries.attempts_on(COMPARISONS[0], 5, 3) == forgeries.attempts_on(COMPARISONS[0], 5, seed)) is same


def test_more_than_the_bound_is_through() -> None:
    files = next(resource for resource in RESOURCES if resource.name == "open files")
    attempt = resources.attempts_on(files, 10, 0)[0]
    trial = resources.run(attempt)
    assert trial.taken is not None and 0 < trial.taken <= files.bound
    assert resources.judged(attempt, trial) == ""
    lower = replace(attempt, resource=replace(files, bound=trial.taken - 1))
    assert resources.judged(lower, trial) == f"took {trial.taken}, bound {trial.taken - 1}"
    assert resources.judged(attempt, replace(trial, rises={"aio contexts": 1.0})) == "aio contexts rose by 1"


@pytest.mark.parametrize(
    ("ending", "note", "fault"),
    [
        (CaseEnd.OK, "", "passed"),
        (CaseEnd.FAILED, "AssertionError: ", ""),
        (CaseEnd.FAILED, "NameError: x", "the attempt itself is at fault: NameError: x"),
        (CaseEnd.COMPILE_ERROR, "", "the attempt itself is at fault: "),
    ],
)
def test_a_passing_forgery_is_a_fault(ending: CaseEnd, note: str, fault: str) -> None:
    assert forgeries.fault_of(Outcome(ending, 0.0, b"", note)) == fault


def test_a_right_program_counts_as_passing() -> None:
    outcome = forgeries.outcome_of(forgeries.Attempt("def f(n): return n + 3", "assert f(2) == 5"), None)
    assert forgeries.fault_of(outcome) == "passed"
