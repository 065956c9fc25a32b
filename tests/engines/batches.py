"""The batch that the contract test of `TrainStrategy` trains on, and each rank's share of the work."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from roll.config.schema.model import ModelConfig
from roll.data import packing
from roll.models.load import load_causal_model
from roll.models.packed import spread_to_tokens
from roll.training.actor_train import TrainShape, micro_batches_of
from roll.types import Floats, TrainBatch
from tests.engines.plain import token_statistics
from tests.engines.training import TEMPERATURE, VERSION, Work

LENGTHS = [9, 4, 14, 6, 11, 3, 8, 5]
SPANNING_SEQUENCE = 2
"""Index of the sequence whose first half was sampled by the previous policy version."""
FP32 = ModelConfig.model_validate({"dtype": "fp32"})


def make_batch(model_folder: Path) -> TrainBatch:
    """Return eight sequences. The behaviour and reference log-probs are the model's own plus a little noise."""
    generator = np.random.default_rng(0)
    sequences = packing.concatenate(
        [generator.integers(0, 250, length).astype(np.int32) for length in LENGTHS],
        [np.arange(length) >= 2 for length in LENGTHS],
    )
    mask = sequences.response_mask
    model = load_causal_model(str(model_folder), FP32, packed=False)
    with torch.no_grad():
        own = spread_to_tokens(token_statistics(model, sequences, TEMPERATURE)[0], sequences)

    def noise(scale: float) -> Floats:
        return np.where(mask, generator.normal(scale=scale, size=len(mask)), 0).astype(np.float32)

    versions = np.repeat(VERSION - np.arange(len(LENGTHS)) % 2, LENGTHS)
    start = sequences.offsets[SPANNING_SEQUENCE]
    versions[start : start + LENGTHS[SPANNING_SEQUENCE] // 2] -= 1
    versions = np.where(mask, versions, 0).astype(np.int32)
    return TrainBatch(sequences, noise(1.0), own + noise(0.3), versions, own + noise(0.2))


def take(batch: TrainBatch, indices: list[int]) -> TrainBatch:
    """Return the batch of the chosen sequences."""
    chosen = packing.token_positions(batch.sequences.offsets, indices)
    assert batch.ref_log_probs is not None
    assert batch.behaviour_log_probs is not None
    return TrainBatch(
        packing.select(batch.sequences, indices),
        batch.advantages[chosen],
        batch.behaviour_log_probs[chosen],
        batch.policy_versions[chosen],
        batch.ref_log_probs[chosen],
    )


def shares(batch: TrainBatch, ranks: int, whole: bool) -> list[Work]:
    """Return the work of each rank. If `whole`, a rank's part of an update is one micro-batch."""
    shape = TrainShape(4, 1, 10**6 if whole else 14, "token-mean", TEMPERATURE)
    updates = [micro_batches_of(batch, range(start, start + 4), ranks, shape) for start in (0, 4)]
    single = micro_batches_of(batch, [2], ranks, shape)
    scored = packing.split_to_budget(LENGTHS, ranks, 14)
    advantages = batch.advantages.copy()
    advantages[5] = np.nan
    broken = micro_batches_of(dataclasses.replace(batch, advantages=advantages), range(4), ranks, shape)

    def share(rank: int) -> Work:
        first, second = ([*updates[number][rank]] for number in (0, 1))
        parts = [packing.select(batch.sequences, indices) for indices in scored.ranks[rank]]
        return Work([first], [second, first, second], [single[rank]], [broken[rank]], parts)

    return [share(rank) for rank in range(ranks)]
