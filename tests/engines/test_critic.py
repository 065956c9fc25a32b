"""A critic on DeepSpeed: its updates equal AdamW's, each value belongs to the state before its token, and splits change
no gradient.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from roll.data import packing
from roll.training.actor_train import TrainShape, merge, micro_batches_of
from roll.types import Floats, TrainBatch
from tests.engines.ranks import run_ranks
from tests.engines.training import Case
from tests.engines.valuing import (
    LOSS,
    PlainCritic,
    Seen,
    Share,
    plain_loss,
    plain_updates,
    value_cases,
    value_gradients,
)
from tests.tiers import collected, each

CASES = [Case(1, False), Case(3, False), Case(3, True), Case(3, True, dtype="bf16")]
EXACT = CASES[:3]
QUICK = [Case(3, True)]
RANKS, BUDGET = 2, 14
LENGTHS = [9, 4, 14, 6, 11, 3, 8, 5, 12, 7]
MICRO_BATCHES = (1, 2, 5)
HEAD = "score.weight"

each_exact_case = each("case", EXACT, QUICK, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    """Return ten sequences with returns, and with values from before the step."""
    generator = np.random.default_rng(2)
    sequences = packing.concatenate(
        [generator.integers(0, 250, length).astype(np.int32) for length in LENGTHS],
        [np.arange(length) >= 2 for length in LENGTHS],
    )
    mask = sequences.response_mask

    def noise(scale: float) -> Floats:
        return np.where(mask, generator.normal(scale=scale, size=len(mask)), 0).astype(np.float32)

    return TrainBatch(
        sequences,
        noise(1.0),
        None,
        np.zeros(len(mask), np.int32),
        values=noise(0.1),
        returns=noise(1.0) + np.where(mask, np.float32(0.5), np.float32(0)),
    )


def shares(batch: TrainBatch) -> list[Share]:
    """Return the work of each rank: two updates, then the same two again. The checkpoint is saved after the first
    update.
    """
    shape = TrainShape(updates=2, epochs=1, token_budget=BUDGET, loss_agg_mode="token-mean", temperature=1.0)
    halves = [micro_batches_of(batch, half, RANKS, shape) for half in (range(5), range(5, 10))]
    scored = packing.split_to_budget(LENGTHS, RANKS, BUDGET)

    def share(rank: int) -> Share:
        first, second = halves[0][rank], halves[1][rank]
        assert len(first) > 1
        return Share(
            [first],
            [second, first, second],
            [packing.select(batch.sequences, indices) for indices in scored.ranks[rank]],
        )

    return [share(rank) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def seen(
    batch: TrainBatch, small_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[Case, list[Seen]]:
    """Run all cases of the tier. Return the results of each case by rank."""
    folder = tmp_path_factory.mktemp("critic")
    cases = collected(request, CASES, QUICK)
    by_rank = run_ranks(value_cases, RANKS, folder, cases, small_model, shares(batch), folder)
    return {case: [seen[number] for seen in by_rank] for number, case in enumerate(cases)}


def gathered(batch: TrainBatch, by_rank: list[list[Floats]]) -> Floats:
    """Return the ranks' fields as one array in the order of the batch, [T]."""
    out = np.zeros(len(batch.sequences.token_ids), np.float32)
    for forwards, fields in zip(packing.split_to_budget(LENGTHS, RANKS, BUDGET).ranks, by_rank, strict=True):
        for indices, field in zip(forwards, fields, strict=True):
            if indices:
                out[packing.token_positions(batch.sequences.offsets, indices)] = field
    return out


@each_exact_case
def test_its_updates_are_adamws(seen: dict[Case, list[Seen]], batch: TrainBatch, small_model: Path, case: Case) -> None:
    one, two = packing.take_sequences(batch, range(5)), packing.take_sequences(batch, range(5, 10))
    plain = plain_updates(small_model, case.lora, [one, two, one, two])
    for got, (expected, _), tolerance in (
        (seen[case][0].first, plain[0], 1e-5),
        (seen[case][0].second, plain[3], 3e-5),
    ):
        assert got.keys() == expected.keys()
        for name, tensor in got.items():
            torch.testing.assert_close(
                tensor, expected[name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
    start = load_file(small_model / "model.safetensors")
    layer = "model.layers.0.mlp.down_proj.weight"
    # The head starts at 0, so the layers below it get no gradient in the first update.
    assert seen[case][0].first[HEAD].abs().max() > 1e-3
    assert (seen[case][0].second[layer] - start[layer]).abs().max() > 1e-3
    first = merge([rank.first_result for rank in seen[case]])
    for name, value in plain[0][1].items():
        assert first[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert first["critic/lr"] == pytest.approx(1e-2)
    assert first["critic/skipped_updates"] == 0
    assert not any(name.startswith(("policy/", "mismatch/")) for name in first)


@each_exact_case
def test_critic_values_are_of_states_before_tokens(
    seen: dict[Case, list[Seen]], batch: TrainBatch, small_model: Path, case: Case
) -> None:
    before, after = (
        gathered(batch, [getattr(rank, name) for rank in seen[case]]) for name in ("values_before", "values_after")
    )
    assert not before.any()
    critic = PlainCritic(small_model, lora=False)
    named = dict(critic.model.named_parameters())
    with torch.no_grad():
        for name, tensor in seen[case][0].second.items():
            (critic.head if name == HEAD else named[name]).copy_(tensor)
        expected = critic.values(batch.sequences)
    mask = batch.sequences.response_mask
    np.testing.assert_allclose(after[mask], expected.numpy(), atol=5e-5)
    assert after[mask].std() > 0.05
    assert not after[~mask].any()


@each("case", CASES, QUICK, ids=lambda case: case.name)
def test_a_resumed_critic_goes_on_to_the_bit(seen: dict[Case, list[Seen]], case: Case) -> None:
    for rank in seen[case]:
        assert rank.resumed_result == rank.second_result
        assert rank.resumed.keys() == rank.second.keys()
        assert all(torch.equal(tensor, rank.second[name]) for name, tensor in rank.resumed.items())


@pytest.mark.full
def test_bf16_trains_near_fp32(seen: dict[Case, list[Seen]], batch: TrainBatch) -> None:
    half, full = (gathered(batch, [rank.values_after for rank in seen[case]]) for case in (CASES[3], CASES[2]))
    assert {tensor.dtype for name, tensor in seen[CASES[3]][0].second.items() if name != HEAD} == {torch.bfloat16}
    assert 0 < np.abs(half - full).max() < 0.2 * np.abs(full).max()


@pytest.mark.full
def test_no_split_changes_the_gradient(batch: TrainBatch, with_head: Path, tmp_path: Path) -> None:
    found: dict[tuple[int, int], Tensor] = {}
    for ranks in (1, 2):
        budgets = {packing.split_to_budget(LENGTHS, ranks, budget).forwards: budget for budget in range(1, 200)}
        work = {}
        for count in MICRO_BATCHES:
            shape = TrainShape(
                updates=1, epochs=1, token_budget=budgets[count], loss_agg_mode="token-mean", temperature=1.0
            )
            by_rank = micro_batches_of(batch, range(len(LENGTHS)), ranks, shape)
            assert [len(micro_batches) for micro_batches in by_rank] == [count] * ranks
            work["values", count] = (LOSS, by_rank)
        seen = run_ranks(value_gradients, ranks, tmp_path / str(ranks), Case(3, False), with_head, work)
        found |= {(ranks, count): gradient for (_, count), gradient in seen[0].items()}
    whole = found[1, 1]
    critic = PlainCritic(with_head, lora=False, head=load_file(with_head / "model.safetensors")[HEAD])
    plain_loss(critic, batch)[0].backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in critic.trains if parameter.grad is not None])
    assert float((whole - expected).norm() / expected.norm()) < 1e-5
    for split, gradient in found.items():
        difference = float((gradient - whole).norm() / whole.norm())
        assert difference < 1e-6, f"{split[0]} ranks, {split[1]} micro-batches: {difference:.1e}"
