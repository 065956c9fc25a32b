"""`ActorTrain`: the work that it gives to its ranks, shared buffers, and the model FLOPs utilisation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from roll.algorithms.objectives import PolicyLoss
from roll.backend import MicroBatch, TrainStepResult, TrainStrategy
from roll.data.packing import FILLER, concatenate
from roll.errors import WeightSyncError
from roll.models.flops import TrainingFlops
from roll.ray.batching import Ranks
from roll.ray.group import WorkerGroup
from roll.training.actor_train import ActorTrain, TrainShape, merge, merge_buckets, micro_batches_of
from roll.types import TrainBatch
from roll.weight_sync.device import DeviceBucket
from roll.weight_sync.routes import Route, SyncRoutes, Transport
from roll.weight_sync.transfer import BucketSender
from tests import limits


class TwoRanks(Ranks[TrainStrategy]):
    """A replacement for a worker group that records the arguments of each rank."""

    def __init__(self, device_name: str | None = None) -> None:
        self.arguments: list[tuple[Any, ...]] = []
        self.device_name = device_name

    def __len__(self) -> int:
        return 2

    async def colocate(self, make: Any, seconds: float) -> TwoRanks:
        return self

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        self.arguments = list(arguments.values())
        if method == BucketSender.fill_bucket.__name__:
            return [
                DeviceBucket((), "sum", of_ranks=(tuple({f"GPU-{rank}": bytes([turn])} for turn in range(openers)),))
                for rank, (_, _, openers) in arguments.items()
            ]
        return [TrainStepResult({"policy/loss": 1.0}, 2, {}) for _ in arguments]


SHAPE = TrainShape(updates=3, epochs=2, token_budget=64, loss_agg_mode="token-mean", temperature=1.0)


def test_ranks_lend_buffers_to_engines_sharing_devices() -> None:
    async def sent() -> DeviceBucket:
        learner = ActorTrain(cast(WorkerGroup, TwoRanks()), SHAPE, Path(), limits.CALL, limits.CALL, limits.CALL)
        to = {0: Route(Transport.SHARED, True), 1: Route(Transport.BROADCAST, True, 1)}
        await learner.open_routes(SyncRoutes(to, [2, 0], 0), None)
        bucket = await learner.send_bucket(["w"], 0)
        assert isinstance(bucket, DeviceBucket)
        return bucket

    bucket = asyncio.run(sent())
    for turn in range(2):
        route = Route(Transport.SHARED, True, sharers=(0,), turn=turn)
        assert bucket.for_route(route).handles == {"GPU-0": bytes([turn])}, "each engine opens a handle of its own"
    assert bucket.for_route(Route(Transport.BROADCAST, True, 1)).handles == {}


def test_ranks_that_gathered_different_weights_are_an_error() -> None:
    same = [DeviceBucket((), "sum", of_ranks=(({f"GPU-{rank}": b""},),)) for rank in range(2)]
    assert [handles.keys() for [handles] in merge_buckets(same).of_ranks] == [{"GPU-0"}, {"GPU-1"}]
    with pytest.raises(WeightSyncError, match=r"sum on rank\(s\) 0, 2; other on rank\(s\) 1$"):
        merge_buckets([same[0], replace(same[1], checksum="other"), same[0]])


@pytest.mark.parametrize("weighted", [False, True])
def test_passes_stay_equal_with_fewer_sequences_than_updates(weighted: bool) -> None:
    """This happens if most responses of a step could not be scored."""
    sequences = concatenate([np.arange(4, dtype=np.int32)], [np.array([False, False, True, True])])
    batch = TrainBatch(sequences, np.ones(4, np.float32), np.zeros(4, np.float32), np.zeros(4, np.int32))
    batch = replace(batch, sequence_weights=np.ones(1, np.float32)) if weighted else batch
    ranks = TwoRanks()
    learner = ActorTrain(cast(WorkerGroup, ranks), SHAPE, Path(), limits.CALL, limits.CALL, limits.CALL)
    assert asyncio.run(learner.train_step(batch, PolicyLoss(), 0)) == {"policy/loss": 0.5}
    for rank, (updates, *_) in enumerate(ranks.arguments):
        assert [len(micro_batches) for micro_batches in updates] == [1] * 6, (
            "other ranks would wait for a rank with fewer passes"
        )
        trained = [sum(is_trained(part) for part in micro_batches) for micro_batches in updates]
        assert trained == ([1, 0, 0] * 2 if rank == 0 else [0] * 6)


@pytest.mark.parametrize(
    ("device", "flops", "mfu"),
    [
        # 2 passes over 30 and 10 tokens: 6 FLOPs per parameter and token, plus 3 x 100 x (900 + 100) / 2 for attention;
        # 4 s, two devices.
        ("NVIDIA H100 80GB HBM3", TrainingFlops(10**9, 10**9, 100), 2 * (6e9 * 40 + 150_000) / (4 * 2 * 989e12)),
        ("NVIDIA H100 80GB HBM3", TrainingFlops(10**9, 0), 2 * 4e9 * 40 / (4 * 2 * 989e12)),
        ("NVIDIA H100 80GB HBM3", None, None),
        ("GeForce of tomorrow", TrainingFlops(10**9, 10**9), None),
        (None, TrainingFlops(10**9, 10**9), None),
    ],
)
def test_utilisation_by_hand(
    device: str | None, flops: TrainingFlops | None, mfu: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.training.actor_train.time", SimpleNamespace(perf_counter=iter([100.0, 104.0]).__next__))
    sequences = concatenate(
        [np.arange(count, dtype=np.int32) for count in (30, 10)], [np.arange(count) > 0 for count in (30, 10)]
    )
    batch = TrainBatch(sequences, np.ones(40, np.float32), np.zeros(40, np.float32), np.zeros(40, np.int32))
    ranks = cast(WorkerGroup, TwoRanks(device))
    learner = ActorTrain(ranks, replace(SHAPE, flops=flops), Path(), limits.CALL, limits.CALL, limits.CALL)
    found = asyncio.run(learner.train_step(batch, PolicyLoss(), 0)).get("throughput/mfu")
    assert found == (None if mfu is None else pytest.approx(mfu))


def is_trained(part: MicroBatch) -> bool:
    """Return whether the micro-batch is not a filler. Check that a filler has no weight in the loss."""
    if part.batch.sequences.token_ids.tolist() != FILLER.token_ids.tolist():
        return True
    assert not part.loss_weights.any() and part.samples == () and not part.batch.sequences.response_mask.any()
    return False


def test_replicas_are_merged_by_what_they_counted() -> None:
    pairs = "reward/margin"
    first = TrainStepResult(
        {"policy/loss": 2.0, "policy/ratio": 1.0}, 1, {"optimizer/lr": 0.1}, {pairs: 6.0}, {pairs: 2.0}
    )
    second = TrainStepResult(
        {"policy/loss": 2.0}, 7, {"optimizer/lr": 0.1}, {pairs: 1.0, "odd": 0.0}, {pairs: 5.0, "odd": 0.0}
    )
    # 4 over 8 tokens, 1 over 8 tokens, and 7 over 7 pairs. The mean of the replicas' means would be 8/7, 1/2 and 1.6.
    assert merge([first, second]) == {"policy/loss": 0.5, "policy/ratio": 0.125, "optimizer/lr": 0.1, pairs: 1.0}


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token-mean", [1 / 3, 1 / 3, 1 / 3]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 1 / 2]),
        ("seq-mean-token-mean", [1 / 4, 1 / 4, 1 / 2]),
        ("seq-mean-token-sum-norm", [1 / 16, 1 / 16, 1 / 16]),  # divided by the loss scale of 8
    ],
)
def test_weights_of_tokens_by_hand(mode: str, weights: list[float]) -> None:
    sequences = concatenate(
        [np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)], [np.arange(3) > 0, np.arange(2) > 0]
    )
    batch = TrainBatch(sequences, np.ones(5, np.float32), np.zeros(5, np.float32), np.zeros(5, np.int32))
    [[part]] = micro_batches_of(batch, [0, 1], 1, replace(SHAPE, loss_agg_mode=mode, loss_scale=8.0))
    assert part.loss_weights[sequences.response_mask] == pytest.approx(weights)
