"""Work is split over replicas: all ranks of a replica get the same work, and its results count once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import ray

from roll.algorithms.losses import NegativeLogLikelihood
from roll.backend import MicroBatch, TrainStepResult, TrainStrategy
from roll.data import packing
from roll.ray.batching import Paced
from roll.ray.group import WorkerGroup
from roll.training.actor_train import Critic, Learner, TrainShape
from roll.types import Floats, Sequences, TrainBatch
from tests import limits

LENGTHS = (7, 3, 9, 4, 5)
SHAPE = TrainShape(updates=1, epochs=1, token_budget=9, loss_agg_mode="token-mean", temperature=1.0)


class FourRanks(WorkerGroup[TrainStrategy]):
    """Two replicas of two ranks. The second rank of each returns None, because its result must not be used."""

    def __init__(self) -> None:
        self.replica_size, self._actors = 2, [None] * 4
        self._paced = Paced(self)
        self.heard: list[tuple[Any, ...]] = []

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        self.heard = list(arguments.values())
        says = {
            "values": values,
            "train_step": lambda updates, *_: learnt(updates[0]),
            "evaluate": lambda parts, *_: learnt(parts),
        }
        return [says[method](*given) if rank % 2 == 0 else None for rank, given in arguments.items()]


def values(micro_batches: Sequence[Sequences]) -> list[Floats]:
    return [part.token_ids.astype(np.float32) for part in micro_batches]


def learnt(micro_batches: Sequence[MicroBatch]) -> TrainStepResult:
    tokens = sum(int(part.batch.sequences.response_mask.sum()) for part in micro_batches)
    samples = float(sum(len(part.samples) for part in micro_batches))
    return TrainStepResult(
        {"sft/loss": 2.0 * tokens}, tokens, {"sft/lr": 0.1}, {"sft/row": samples}, {"sft/row": samples}
    )


def batch() -> TrainBatch:
    ids = np.split(np.arange(sum(LENGTHS), dtype=np.int32), np.cumsum(LENGTHS)[:-1])
    sequences = packing.concatenate(ids, [np.arange(length) > 0 for length in LENGTHS])
    zeros = np.zeros(len(sequences.token_ids), np.float32)
    return TrainBatch(sequences, zeros, None, zeros.astype(np.int32))


def test_replica_ranks_score_the_same_sequences_once() -> None:
    group, sequences = FourRanks(), batch().sequences
    assert group.replicas == 2
    got = asyncio.run(Critic(group, SHAPE, limits.CALL, limits.CALL, limits.CALL).values(sequences))
    assert got.tolist() == sequences.token_ids.tolist()
    assert group.heard[0] is group.heard[1]
    assert group.heard[2] is group.heard[3]
    assert group.heard[0] is not group.heard[2]


def test_replicas_learn_each_sequence_once() -> None:
    group, learner = FourRanks(), Learner(FourRanks(), SHAPE, limits.CALL, limits.CALL, limits.CALL)
    assert asyncio.run(learner.train_step(batch(), NegativeLogLikelihood(), 0)) == {
        "sft/loss": 2.0,
        "sft/lr": 0.1,
        "sft/row": 1.0,
    }
    results = asyncio.run(
        Learner(group, SHAPE, limits.CALL, limits.CALL, limits.CALL).evaluate(batch(), NegativeLogLikelihood())
    )
    assert sum(result.tokens for result in results) == sum(LENGTHS) - len(LENGTHS)
    by_replica = [group.heard[rank][0] for rank in (0, 2)]
    assert group.heard[1][0] is by_replica[0]
    assert sorted(sample for parts in by_replica for part in parts for sample in part.samples) == list(
        range(len(LENGTHS))
    )
    # The loss weights sum to one over the replicas, and not over the ranks.
    weights = sum(float(part.loss_weights.sum(dtype=np.float64)) for parts in by_replica for part in parts)
    assert abs(weights - 1) < 1e-6


def test_replica_ranks_share_one_stored_list(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[Any] = []
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or len(stored))
    first, second = (["a"], 1.0), (["b"], 1.0)
    sent = FourRanks()._stored({0: first, 1: first, 2: second, 3: second})
    assert stored == [["a"], ["b"]]
    assert list(sent.values()) == [(1, 1.0), (1, 1.0), (2, 1.0), (2, 1.0)]
    same = (["names"],)
    assert FourRanks()._stored(dict.fromkeys(range(4), same))[3] is same, (
        "small arguments of all ranks stay in messages"
    )
