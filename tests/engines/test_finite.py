"""An update whose loss or gradient is not finite changes no state on any ZeRO stage, and the log names the micro-batch
and the rank.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from roll.data import packing
from roll.training.actor_train import TrainShape, micro_batches_of
from roll.types import TrainBatch
from tests.engines.planting import PLANTS, Faults, Plan, plant_everywhere
from tests.engines.ranks import run_ranks
from tests.engines.training import TEMPERATURE, VERSION
from tests.tiers import collected, each

pytestmark = pytest.mark.full  # too long for `make test`; `.ci/run` runs it

LENGTHS = [9, 8, 9, 8, 9, 8, 9, 8]
PLANS = [Plan(stage, dtype) for stage in range(4) for dtype in ("fp32", "bf16", "fp16")]
PLANS += [Plan(stage, "bf16", offload="optimizer") for stage in (1, 2, 3)]
PLANS += [Plan(2, "fp32", offload="optimizer"), Plan(3, "bf16", offload="all")]
PLANS += [Plan(0, "bf16", lora=True), Plan(3, "bf16", lora=True), Plan(3, "fp32", True, "all")]
QUICK = [Plan(0, "fp16"), Plan(2, "fp32"), Plan(3, "bf16", lora=True)]

each_plan = each("plan", PLANS, QUICK, ids=lambda plan: plan.name)
Runs = dict[Plan, list[Faults]]


@pytest.fixture(scope="module")
def runs(small_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    """Run all plans of the tier on two ranks. In each update, a rank has two micro-batches of one sequence each."""
    generator = np.random.default_rng(0)
    sequences = packing.concatenate(
        [generator.integers(0, 250, length).astype(np.int32) for length in LENGTHS],
        [np.arange(length) >= 2 for length in LENGTHS],
    )
    mask = sequences.response_mask
    fields = (np.where(mask, generator.normal(size=len(mask)) - mean, 0).astype(np.float32) for mean in (0, 5, 5))
    advantages, behaviour, ref = fields
    batch = TrainBatch(sequences, advantages, behaviour, np.where(mask, VERSION, 0).astype(np.int32), ref)
    shape = TrainShape(4, 1, 10, "token-mean", TEMPERATURE)
    updates = [micro_batches_of(batch, range(start, start + 4), 2, shape) for start in (0, 4)]
    work = [[update[rank] for update in updates] for rank in range(2)]
    assert [[len(update) for update in updates] for updates in work] == [[2, 2], [2, 2]]
    folder = tmp_path_factory.mktemp("finite")
    plans = collected(request, PLANS, QUICK)
    by_rank = run_ranks(plant_everywhere, 2, folder, plans, small_model, work, folder)
    return {plan: [faults[number] for faults in by_rank] for number, plan in enumerate(plans)}


@each_plan
@pytest.mark.parametrize("plant", PLANTS)
def test_non_finite_update_is_skipped_on_all_ranks(runs: Runs, plan: Plan, plant: str) -> None:
    for faults in runs[plan]:
        assert faults.skips[plant].skipped == 1
        assert faults.skips[plant].differences == []
    # An update that is not skipped does change the compared states.
    assert runs[plan][0].moved > 3


@each_plan
@pytest.mark.parametrize("plant", PLANTS)
def test_the_culprit_is_named(runs: Runs, plan: Plan, plant: str) -> None:
    said = runs[plan][0].skips[plant].said
    what = "the gradient of " if plant == "gradient" else "the loss is not finite"
    number = 0 if plant == "loss" else 1
    assert said.startswith(f"actor_train: an update was skipped: {what}")
    # The marked update is the second of the step: samples 4 to 7, of which rank 1 has the last two.
    assert f" micro-batch {number} of rank 1 (samples {6 + number} " in said


@each_plan
def test_schedule_waits_while_updates_are_skipped(runs: Runs, plan: Plan) -> None:
    faults = runs[plan][0]
    good, *skipped = faults.rates
    assert good > skipped[0]
    assert skipped == [skipped[0]] * len(PLANTS)
    if plan.dtype == "fp16":
        # Every skip halves the scale, except for the first with ZeRO (DeepSpeed's `hysteresis` of 2).
        assert faults.scales == ([256, 128, 64, 32, 16] if plan.stage == 0 else [256, 256, 128, 64, 32])
    else:
        assert faults.scales == [None] * (1 + len(PLANTS))
        assert faults.afterwards == []


@each_plan
def test_consecutive_skips_end_run_with_first_cause(runs: Runs, plan: Plan) -> None:
    for faults in runs[plan]:
        assert faults.end.startswith("NonFiniteError: 2 updates ") and "the gradient of" in faults.end
        assert " micro-batch 1 of rank 1 (samples 7 " in faults.end
