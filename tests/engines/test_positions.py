"""Large position ids: a bf16 model under ZeRO-3 computes the same log-probs for them as the same model without
sharding.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from roll.backend import Rank
from roll.config.schema.model import ModelConfig
from roll.data import packing
from roll.models.load import load_causal_model
from roll.models.packed import PackedPolicy, packed_inputs
from roll.types import Floats, Sequences
from tests.engines.ranks import run_ranks
from tests.engines.training import SEED, TEMPERATURE, Case, trainer

pytestmark = pytest.mark.full

LENGTH = 700
"""Sequence length in tokens. At these positions, rotary frequencies rounded to bf16 would give angles wrong by up to a
radian.
"""


def scored(rank: Rank, model: Path, sequences: Sequences) -> Floats:
    """Return the trainer's log-probs before any update."""
    with trainer(Case(3, lora=False, dtype="bf16"), model, rank, SEED) as strategy:
        return strategy.log_probs([sequences], TEMPERATURE, True)[0]


@pytest.fixture
def sequences() -> Sequences:
    ids = np.random.default_rng(0).integers(0, 250, LENGTH).astype(np.int32)
    return packing.concatenate([ids], [np.arange(LENGTH) >= LENGTH - 100])


def test_far_positions_under_zero3_in_bf16(small_model: Path, sequences: Sequences, tmp_path: Path) -> None:
    plain = PackedPolicy(load_causal_model(str(small_model), ModelConfig.model_validate({"dtype": "bf16"}))).eval()
    with torch.no_grad():
        expected = plain(packed_inputs(sequences, "cpu", TEMPERATURE))[0].numpy()
    (found,) = run_ranks(scored, 1, tmp_path, small_model, sequences)
    np.testing.assert_allclose(found[sequences.response_mask], expected, atol=1e-3)
