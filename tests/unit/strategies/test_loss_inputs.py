"""Inputs of the loss: the tokens of responses that span an update of the policy."""

from __future__ import annotations

import numpy as np
import pytest

from roll.data.packing import concatenate
from roll.training.deepspeed.strategy import spans_update
from roll.types import TrainBatch


@pytest.mark.parametrize("seed", range(20))
def test_tokens_of_responses_that_several_versions_sampled(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    lengths = numbers.integers(1, 7, 8)
    masks = [numbers.random(length) < 0.6 for length in lengths]
    versions = [np.where(mask, numbers.integers(4, 6, len(mask)), 0) for mask in masks]
    sequences = concatenate([np.zeros(length, np.int32) for length in lengths], masks)
    zeros = np.zeros(lengths.sum(), np.float32)
    batch = TrainBatch(sequences, zeros, zeros, np.concatenate(versions).astype(np.int32))
    expected = [
        len(set(row[mask].tolist())) > 1 for row, mask in zip(versions, masks, strict=True) for _ in range(mask.sum())
    ]
    assert spans_update(batch).tolist() == expected
