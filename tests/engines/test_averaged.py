"""The moving average of the weights in training: its values against those of a plain model with weights averaged in
float64, on all ZeRO stages; and the policy that is averaged stays bitwise as it is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.backend import Rank
from roll.data import packing
from roll.models.load import load_policy
from roll.models.packed import score
from roll.training.actor_train import TrainShape, micro_batches_of, share_out
from roll.types import Floats, TrainBatch
from tests import limits
from tests.engines.averaging import RATE, Averaged, Plan, average_plans
from tests.engines.ranks import run_ranks
from tests.engines.training import SEED, TEMPERATURE, VERSION, Case, model_args
from tests.tiers import collected, each

pytestmark = pytest.mark.engines

LENGTHS = [9, 8, 7, 8, 6, 8, 9, 5]
PLANS = [Plan(0), Plan(1), Plan(2, lora=True), Plan(2, dtype="bf16"), Plan(3), Plan(3, lora=True, persist=True)]
PLANS += [Plan(3, dtype="bf16", persist=True)]
QUICK = [Plan(3, lora=True, persist=True)]
each_plan = each("plan", PLANS, QUICK, ids=lambda plan: str(plan))
Runs = dict[Plan, list[Averaged]]


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    generator = np.random.default_rng(0)
    sequences = packing.concatenate(
        [generator.integers(0, 250, length).astype(np.int32) for length in LENGTHS],
        [np.arange(length) >= 2 for length in LENGTHS],
    )
    mask = sequences.response_mask
    fields = (np.where(mask, generator.normal(size=len(mask)) - mean, 0).astype(np.float32) for mean in (0, 5, 5))
    advantages, behaviour, ref = fields
    return TrainBatch(sequences, advantages, behaviour, np.where(mask, VERSION, 0).astype(np.int32), ref)


@pytest.fixture(scope="module")
def runs(
    small_model: Path, batch: TrainBatch, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Runs:
    """Run the plans of the tier on two ranks: three steps of one update, and one more after a checkpoint."""
    shape = TrainShape(1, 1, 40, "token-mean", TEMPERATURE)
    updates = [micro_batches_of(batch, range(len(batch)), 2, shape)] * 4
    work = [[update[rank] for update in updates] for rank in range(2)]
    _, scored = share_out(batch.sequences, 2, 40)
    folder, plans = tmp_path_factory.mktemp("averaged"), collected(request, PLANS, QUICK)
    by_rank = run_ranks(average_plans, 2, folder, plans, small_model, work, scored, folder)
    return {plan: [results[number] for results in by_rank] for number, plan in enumerate(plans)}


def exact_average(weights: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the average of the weights after each step, which begins with those at the start, in float64."""
    average = {name: values.double() for name, values in weights[0].items()}
    for newer in weights[1:]:
        average = {name: (1 - RATE) * average[name] + RATE * newer[name].double() for name in average}
    return average


@each_plan
def test_average_scores_like_plain_averaged_weights(
    runs: Runs, plan: Plan, small_model: Path, batch: TrainBatch
) -> None:
    first, second = runs[plan]
    model = load_policy(str(small_model), model_args(Case(plan.stage, plan.lora, plan.dtype)), SEED)
    named, average = dict(model.named_parameters()), exact_average(first.weights)
    assert {name for name, one in named.items() if one.requires_grad} == average.keys()
    moved = max(float((average[name] - first.weights[-1][name]).abs().max()) for name in average)
    assert moved > 1e-3, "the average differs from the policy"
    with torch.no_grad():
        for name, values in average.items():
            named[name].copy_(values)
        _, parts = share_out(batch.sequences, 2, 40)
        plain = [score(model.eval(), own, TEMPERATURE, Rank("test", 0, 1, "", 0, "cpu", limits.CALL)) for own in parts]
    tolerance = 2e-5 if plan.dtype == "fp32" else 0.05
    for found, expected in zip([first.average, second.average], plain, strict=True):
        np.testing.assert_allclose(together(found), together(expected), atol=tolerance)
    assert np.abs(together(first.average) - together(first.policy[0])).max() > 10 * tolerance / 5


def together(parts: list[Floats]) -> Floats:
    return np.concatenate(parts)


@each_plan
def test_policy_is_bitwise_what_it_was(runs: Runs, plan: Plan) -> None:
    for one in runs[plan]:
        assert together(one.policy[0]).tolist() == together(one.policy[1]).tolist()
        assert together(one.at_start[0]).tolist() == together(one.at_start[1]).tolist()


@each_plan
def test_resume_continues_the_average_exactly(runs: Runs, plan: Plan) -> None:
    for one in runs[plan]:
        assert together(one.resumed).tolist() == together(one.average).tolist()
        alone, resumed = one.last
        assert all(torch.equal(alone[name], resumed[name]) for name in alone)
        assert one.refusal.startswith("CheckpointError: ") and "averaged" in one.refusal
