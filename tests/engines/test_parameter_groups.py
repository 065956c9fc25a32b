"""ZeRO-1 and ZeRO-2 train the same weights with few groups of parameters and with many, and no checkpoint of other
groups is taken for one of the run's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from roll.export.__main__ import main
from roll.runs.checkpoint.manifest import LOOP_FILE, LoopState, seal
from roll.training.actor_train import merge
from roll.types import TrainBatch
from tests.engines.parameter_groups import SMALL, USUAL, Grouped, Resumed, resume_grouped, train_grouped
from tests.engines.ranks import run_ranks
from tests.engines.test_elastic import config_of
from tests.engines.test_train import assert_close, batch, shares  # noqa: F401  (the fixture)
from tests.engines.training import Case

CASES = [Case(1, False), Case(1, False, dtype="bf16", fp32_sums=True), Case(2, False, optimizer="muon")]
each_case = pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
RANKS = 2
TOLERANCE = 2e-6
"""Tolerance of fp32 weights after four updates: the order of summation of the gradient norm depends on the groups."""


@dataclass(frozen=True)
class Runs:
    """Results by rank, then by case."""

    trained: list[list[tuple[Grouped, Grouped]]]
    resumed: list[list[Resumed]]


@pytest.fixture(scope="module")
def runs(batch: TrainBatch, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:  # noqa: F811
    """Train and resume on two ranks. This starts two groups of processes."""
    folder, work = tmp_path_factory.mktemp("groups"), shares(batch, RANKS, whole=False)
    trained = run_ranks(train_grouped, RANKS, folder, CASES, small_model, work, folder)
    for case in (case for case in CASES if case.optimizer == "adamw"):
        for run in (folder / case.name / str(largest) for largest in (USUAL, SMALL)):
            LoopState(1, 1, {"position": 3}, {}, 1.0).write(run / "checkpoints" / "step_1")
            seal(run / "checkpoints" / "step_1", 1, 1, [LOOP_FILE])
            (run / "config.yaml").write_text(config_of(case, small_model))
            assert main([str(run), str(run / "universal"), "--format", "universal"]) == 0
    return Runs(trained, run_ranks(resume_grouped, RANKS, folder, CASES, small_model, work, folder))


@each_case
def test_weights_do_not_depend_on_the_groups(runs: Runs, number: int) -> None:
    few, many = runs.trained[0][number]
    losses = [merge([rank[number][kind].result for rank in runs.trained])["policy/loss"] for kind in (0, 1)]
    assert len(many.sizes) > len(few.sizes) + 4 and sum(many.sizes) == sum(few.sizes)
    assert max(many.sizes) > SMALL, "the embedding is a group by itself"
    assert_close(many.weights, few.weights, tolerance(number))
    assert losses[0] == pytest.approx(losses[1], abs=tolerance(number))


def lr_of(results: Sequence[Grouped | None]) -> float:
    return merge([each.result for each in results if each])["policy/lr"]


@each_case
def test_runs_resume_with_their_groups_and_from_others(runs: Runs, number: int) -> None:
    few, many = runs.trained[0][number]
    ranks = [rank[number] for rank in runs.resumed]
    assert_close(ranks[0].own.weights, many.weights, 0.0)
    for results, expected in (([rank.split for rank in ranks], many), ([rank.joined for rank in ranks], few)):
        found = results[0]
        assert (found is not None) is (CASES[number].optimizer == "adamw"), "DeepSpeed converts only Adam's moments"
        if found is not None:
            assert_close(found.weights, expected.weights, tolerance(number))
            assert len(found.sizes) == len(expected.sizes)
            assert lr_of(results) == lr_of([rank.own for rank in ranks])


@each_case
def test_a_checkpoint_of_other_groups_is_refused(runs: Runs, number: int) -> None:
    for rank in runs.resumed:
        refusal = rank[number].refusal
        assert refusal.startswith("CheckpointError") and "other groups of parameters" in refusal
        assert "--format universal" in refusal


def tolerance(number: int) -> float:
    return TOLERANCE if CASES[number].dtype == "fp32" else 2e-2
