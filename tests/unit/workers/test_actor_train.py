"""What a facade that learns hands to its ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from roll.algorithms.policy_loss import PolicyLoss
from roll.data.packing import FILLER, concatenate
from roll.strategies.base import MicroBatch, TrainResult, TrainStrategy
from roll.types import TrainBatch
from roll.weight_sync.device import DeviceBucket
from roll.weight_sync.routes import Route, Routes, Transport
from roll.weight_sync.sender import BucketSender
from roll.workers.actor_train import ActorTrain, TrainShape
from roll.workers.calls import Ranks
from roll.workers.group import WorkerGroup
from tests import limits


class TwoRanks(Ranks[TrainStrategy]):
    """Stands in for a group: notes what each rank is to run."""

    def __init__(self) -> None:
        self.arguments: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return 2

    async def beside(self, make: Any, seconds: float) -> TwoRanks:
        return self

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        self.arguments = list(arguments.values())
        if method == BucketSender.fill_bucket.__name__:
            return [DeviceBucket((), "sum", {f"GPU-{rank}": b""} if shared else {}) for rank, (_, _, shared) in arguments.items()]
        return [TrainResult({"policy/loss": 1.0}, 2, {}) for _ in arguments]


SHAPE = TrainShape(updates=3, epochs=2, token_budget=64, loss_agg_mode="token-mean", temperature=1.0)


def test_ranks_lend_their_buffers_where_an_engine_borrows_them() -> None:
    async def sent() -> DeviceBucket:
        learner = ActorTrain(cast(WorkerGroup, TwoRanks()), SHAPE, Path(), limits.CALL, limits.CALL, limits.CALL)
        to = {0: Route(Transport.SHARED, True), 1: Route(Transport.BROADCAST, True, 1)}
        await learner.open_routes(Routes(to, [True, False], 0), None)
        bucket = await learner.send_bucket(["w"], 0)
        assert isinstance(bucket, DeviceBucket)
        return bucket

    assert asyncio.run(sent()).handles.keys() == {"GPU-0"}


@pytest.mark.parametrize("weighted", [False, True])
def test_a_step_with_fewer_sequences_than_updates_makes_them_all_the_same(weighted: bool) -> None:
    """So it is where the rewards of a step gave no verdict on most responses."""
    sequences = concatenate([np.arange(4, dtype=np.int32)], [np.array([False, False, True, True])])
    batch = TrainBatch(sequences, np.ones(4, np.float32), np.zeros(4, np.float32), np.zeros(4, np.int32))
    batch = replace(batch, sequence_weights=np.ones(1, np.float32)) if weighted else batch
    ranks = TwoRanks()
    learner = ActorTrain(cast(WorkerGroup, ranks), SHAPE, Path(), limits.CALL, limits.CALL, limits.CALL)
    assert asyncio.run(learner.train_step(batch, PolicyLoss(), 0)) == {"policy/loss": 0.5}
    for rank, (updates, *_) in enumerate(ranks.arguments):
        assert [len(micro_batches) for micro_batches in updates] == [1] * 6, "a rank that ran fewer passes would be waited for"
        trained = [sum(is_trained(part) for part in micro_batches) for micro_batches in updates]
        assert trained == ([1, 0, 0] * 2 if rank == 0 else [0] * 6)


def is_trained(part: MicroBatch) -> bool:
    """Whether it is more than the filler, which weighs nothing."""
    if part.batch.sequences.token_ids.tolist() != FILLER.token_ids.tolist():
        return True
    assert not part.loss_weights.any() and part.samples == () and not part.batch.sequences.response_mask.any()
    return False
