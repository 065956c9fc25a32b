"""On DeepSpeed, the gradient does not depend on the split into ranks and micro-batches, nor on sequence parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.algorithms.corrections import Correction
from roll.algorithms.losses import Loss, NegativeLogLikelihood
from roll.algorithms.objectives import Cispo, Gspo, KlCov, PolicyLoss, Ppo
from roll.config.schema.model import ModelConfig
from roll.data import packing
from roll.models.load import load_causal_model
from roll.models.packed import spread_to_tokens
from roll.training.actor_train import TrainShape, micro_batches_of
from roll.types import Floats, TrainBatch
from tests.engines.plain import token_statistics
from tests.engines.ranks import run_ranks
from tests.engines.splitting import Work, gradients, gradients_by_case
from tests.engines.training import TEMPERATURE, Case
from tests.tiers import tiered

pytestmark = pytest.mark.full  # too long for `make test`; `.ci/run` runs it

LENGTHS = [9, 4, 14, 6, 11, 3, 8, 5, 12, 7]
MICRO_BATCHES = (1, 2, 5)
LOSSES: dict[str, tuple[Loss, str]] = {
    "ppo": (PolicyLoss(Ppo(0.2, 0.28, 3.0), kl_coef=0.1, entropy_coef=0.01), "token-mean"),
    "gspo": (PolicyLoss(Gspo(0.02, 0.03)), "seq-mean-token-mean"),
    "cispo": (PolicyLoss(Cispo(), Correction(weight="token", cap=1.1)), "seq-mean-token-sum"),
    "kl_cov": (PolicyLoss(KlCov(ratio=0.2)), "token-mean"),
}
CASES = [Case(3, False), Case(3, True)]
STAGES = [Case(0, False), Case(1, False), Case(2, False), Case(2, True)]
"""Stages that reduce gradients at different times: after the last micro-batch (0, 1), or after each micro-batch (2)."""
ON_STAGES = ("ppo", "gspo")

OVER_TWO = [
    Case(1, False, sequence_parallel=2),
    Case(3, False, sequence_parallel=2),
    Case(3, True, sequence_parallel=2),
]
"""Cases with sequence parallelism. The cut between the ranks falls inside sequences."""

TIED = [Case(2, False), Case(3, False)]

Gradients = dict[tuple[int, str, int], Tensor]
ByWork = dict[tuple[str, int], Tensor]


@pytest.fixture(scope="module")
def batch(small_model: Path) -> TrainBatch:
    """Return ten sequences. The behaviour, reference and proximal log-probs are the model's own plus a little noise."""
    generator = np.random.default_rng(1)
    sequences = packing.concatenate(
        [generator.integers(0, 250, length).astype(np.int32) for length in LENGTHS],
        [np.arange(length) >= 2 for length in LENGTHS],
    )
    mask = sequences.response_mask
    model = load_causal_model(str(small_model), ModelConfig.model_validate({"dtype": "fp32"}), packed=False)
    with torch.no_grad():
        own = spread_to_tokens(token_statistics(model, sequences, TEMPERATURE)[0], sequences)

    def near(scale: float) -> Floats:
        return np.where(mask, own + generator.normal(scale=scale, size=len(mask)), 0).astype(np.float32)

    advantages = np.where(mask, generator.normal(size=len(mask)), 0).astype(np.float32)
    return TrainBatch(sequences, advantages, near(0.25), np.zeros(len(mask), np.int32), near(0.3), near(0.2))


def work(batch: TrainBatch, ranks: int, losses: Iterable[str], counts: Sequence[int] = MICRO_BATCHES) -> Work:
    """Return an update for each of the losses and each number of micro-batches per rank."""
    budgets = {packing.split_to_budget(LENGTHS, ranks, budget).forwards: budget for budget in range(1, 200)}
    out = {}
    for name in losses:
        loss, mode = LOSSES[name]
        selected = replace(batch, token_selection=loss.token_selection(batch))
        for count in counts:
            shape = TrainShape(
                updates=1, epochs=1, token_budget=budgets[count], loss_agg_mode=mode, temperature=TEMPERATURE
            )
            by_rank = micro_batches_of(selected, range(len(LENGTHS)), ranks, shape)
            assert [len(micro_batches) for micro_batches in by_rank] == [count] * ranks
            out[name, count] = (loss, by_rank)
    return out


@pytest.fixture(scope="module", params=tiered(CASES, CASES[1:]), ids=lambda case: case.name)
def seen(
    request: pytest.FixtureRequest, batch: TrainBatch, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Gradients:
    """Return gradients. Key: number of ranks, name of the loss, number of micro-batches per rank."""
    out: Gradients = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp("split")
        by_rank = run_ranks(gradients, ranks, folder, request.param, small_model, work(batch, ranks, LOSSES))
        out |= {(ranks, *key): gradient for key, gradient in by_rank[0].items()}
    return out


@pytest.mark.parametrize("name", LOSSES)
def test_no_split_changes_the_gradient(seen: Gradients, name: str) -> None:
    whole = seen[1, name, 1]
    assert whole.norm() > 1e-3
    for ranks in (1, 2):
        for count in MICRO_BATCHES:
            difference = float((seen[ranks, name, count] - whole).norm() / whole.norm())
            assert difference < 1e-6, f"{ranks} ranks, {count} micro-batches: {difference:.1e}"


@pytest.fixture(scope="module")
def by_stage(
    batch: TrainBatch, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, tuple[ByWork, ByWork]]:
    """Return for each case the gradients on one rank with one micro-batch, and the gradients on two ranks."""
    alone, together = work(batch, 1, ON_STAGES, counts=(1,)), work(batch, 2, ON_STAGES)
    [whole] = run_ranks(gradients_by_case, 1, tmp_path_factory.mktemp("alone"), STAGES, small_model, alone)
    split, _ = run_ranks(gradients_by_case, 2, tmp_path_factory.mktemp("together"), STAGES, small_model, together)
    return {case: (one, two) for case, one, two in zip(STAGES, whole, split, strict=True)}


@pytest.mark.full
@pytest.mark.parametrize("name", ON_STAGES)
@pytest.mark.parametrize("case", STAGES, ids=lambda case: case.name)
def test_no_split_changes_the_gradient_on_other_stages(
    by_stage: dict[Case, tuple[ByWork, ByWork]], case: Case, name: str
) -> None:
    one, two = by_stage[case]
    whole = one[name, 1]
    assert whole.norm() > 1e-3
    for count in MICRO_BATCHES:
        difference = float((two[name, count] - whole).norm() / whole.norm())
        assert difference < 1e-6, f"2 ranks, {count} micro-batches: {difference:.1e}"


@pytest.fixture(scope="module")
def shared(
    batch: TrainBatch, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, tuple[ByWork, ByWork]]:
    """Return for each case the gradients on one rank, and the gradients on two ranks that split the same
    micro-batches.
    """
    given = work(batch, 1, LOSSES, counts=(1, 5))
    odd = [len(part.batch.sequences.token_ids) % 2 for _, by_rank in given.values() for part in by_rank[0]]
    assert any(odd)
    alone = [replace(case, sequence_parallel=1) for case in OVER_TWO]
    [whole] = run_ranks(gradients_by_case, 1, tmp_path_factory.mktemp("alone"), alone, small_model, given)
    same = {key: (loss, [*by_rank, *by_rank]) for key, (loss, by_rank) in given.items()}
    parts, _ = run_ranks(gradients_by_case, 2, tmp_path_factory.mktemp("shared"), OVER_TWO, small_model, same)
    return {case: (one, two) for case, one, two in zip(OVER_TWO, whole, parts, strict=True)}


@pytest.mark.full
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("case", OVER_TWO, ids=lambda case: case.name)
def test_sharing_tokens_out_changes_no_gradient(
    shared: dict[Case, tuple[ByWork, ByWork]], case: Case, name: str
) -> None:
    one, two = shared[case]
    for count in (1, 5):
        whole = one[name, count]
        assert whole.norm() > 1e-3
        difference = float((two[name, count] - whole).norm() / whole.norm())
        assert difference < 1e-6, f"{count} micro-batches: {difference:.1e}"


@pytest.mark.full
def test_tied_matrix_gradient_sums_both_uses(small_tied_model: Path, batch: TrainBatch, tmp_path: Path) -> None:
    """Embedding and head are one tensor, and ZeRO shards it once."""
    model = load_causal_model(
        str(small_tied_model), ModelConfig.model_validate({"dtype": "fp32"}), packed=False
    ).double()
    (-token_statistics(model, batch.sequences, TEMPERATURE)[0].mean()).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    shape = TrainShape(updates=1, epochs=1, token_budget=20, loss_agg_mode="token-mean", temperature=TEMPERATURE)
    given: Work = {("sft", 0): (NegativeLogLikelihood(), micro_batches_of(batch, range(len(LENGTHS)), 2, shape))}
    by_case, _ = run_ranks(gradients_by_case, 2, tmp_path, TIED, small_tied_model, given)
    for case, seen in zip(TIED, by_case, strict=True):
        difference = float((seen["sft", 0] - expected).norm() / expected.norm())
        assert difference < 1e-5, f"{case.name}: {difference:.1e}"
