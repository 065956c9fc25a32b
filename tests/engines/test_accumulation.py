"""Summing the gradients of many micro-batches is inexact in bf16 and exact in fp32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from roll.algorithms.losses import NegativeLogLikelihood
from roll.data import packing
from roll.training.actor_train import TrainShape, micro_batches_of
from roll.types import TrainBatch
from tests.engines.ranks import run_ranks
from tests.engines.splitting import Work, gradients_by_case
from tests.engines.training import Case

pytestmark = pytest.mark.full

PLAIN = Case(3, False, "bf16")
CASES = [PLAIN, Case(2, False, "bf16", fp32_sums=True), Case(3, False, "bf16", fp32_sums=True)]
COUNT, LENGTH = 8, 12
"""Number of sequences, and number of tokens of each. Every sequence is a micro-batch."""


def test_sums_of_bf16_gradients_are_exact_in_fp32(small_model: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    ids = [generator.integers(0, 250, LENGTH).astype(np.int32) for _ in range(COUNT)]
    sequences = packing.concatenate(ids, [np.arange(LENGTH) >= 2] * COUNT)
    nothing = np.zeros(COUNT * LENGTH, np.float32)
    batch = TrainBatch(sequences, nothing, None, nothing.astype(np.int32))
    shape = TrainShape(updates=1, epochs=1, token_budget=LENGTH, loss_agg_mode="token-mean", temperature=1.0)
    [micro_batches] = micro_batches_of(batch, range(COUNT), 1, shape)
    assert len(micro_batches) == COUNT
    loss = NegativeLogLikelihood()
    work: Work = {("all", 0): (loss, [micro_batches])} | {
        ("one", number): (loss, [[one]]) for number, one in enumerate(micro_batches)
    }
    [by_case] = run_ranks(gradients_by_case, 1, tmp_path, CASES, small_model, work)
    for case, seen in zip(CASES, by_case, strict=True):
        expected = torch.stack([seen["one", number] for number in range(COUNT)]).sum(0)
        difference = float((seen["all", 0] - expected).norm() / expected.norm())
        assert 1e-3 < difference < 2e-2 if case == PLAIN else difference < 1e-6, f"{case.name}: {difference:.1e}"
