"""Weights of the routers' loss over micro-batches and ranks."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.backend import MicroBatch, Rank
from roll.data.packing import concatenate
from roll.training.deepspeed.strategy import RouterBalance
from roll.types import TrainBatch
from tests import limits


class Loss:
    """Stands in for `RouterLoss`, and records the weight of each micro-batch."""

    def __init__(self) -> None:
        self.weights: list[Tensor | None] = []

    def begin(self, weight: Tensor | None) -> None:
        self.weights.append(weight)


def micro_batch(tokens: int) -> MicroBatch:
    """Return a micro-batch of one sequence, or a filler for 0 tokens."""
    sequences = concatenate([np.zeros(tokens or 2, np.int32)], [np.zeros(tokens or 2, np.bool_)])
    zeros = np.zeros(tokens or 2, np.float32)
    return MicroBatch(
        TrainBatch(sequences, zeros, None, np.zeros(tokens or 2, np.int32)), zeros, (0,) if tokens else ()
    )


def weights_of(
    tokens: list[int], ranks: int, elsewhere: int, coefficient: float, monkeypatch: pytest.MonkeyPatch
) -> list[float | None]:
    """Return the weights of one rank's micro-batches, while the other ranks have `elsewhere` tokens in all."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total.add_(elsewhere))
    loss = Loss()
    balance = RouterBalance(
        cast(Any, loss), coefficient, Rank("actor_train", 0, ranks, "127.0.0.1", 0, "cpu", limits.START)
    )
    micro_batches = [micro_batch(count) for count in tokens]
    balance.begin_update(micro_batches)
    for one in micro_batches:
        balance.begin(one)
    return [None if weight is None else float(weight) for weight in loss.weights]


def test_weights_are_shares_of_tokens_times_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed averages gradients over the ranks, so the sum of the weights over all ranks is the number of ranks."""
    assert weights_of([30, 10], 1, 0, 0.5, monkeypatch) == pytest.approx([0.375, 0.125])
    here = weights_of([30, 10, 0], 2, 60, 0.5, monkeypatch)
    assert here == pytest.approx([0.5 * 2 * 0.3, 0.5 * 2 * 0.1, 0.0])
    there = weights_of([60], 2, 40, 0.5, monkeypatch)
    assert sum(weight or 0.0 for weight in here + there) == pytest.approx(0.5 * 2)


def test_a_coefficient_of_0_only_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights_of([30, 10], 2, 60, 0.0, monkeypatch) == [None, None]
