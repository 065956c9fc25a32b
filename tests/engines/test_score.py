"""Contract test of `ScoreStrategy` for `HfScore`, and for `DeepSpeedScore` on two ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from roll.backend import Rank
from roll.config.schema.model import ModelConfig
from roll.data import packing
from roll.engines.hf.settings import HfScoreSettings
from roll.engines.hf.strategy import HfScore
from roll.models.packed import PackedPolicy, spread_to_tokens
from roll.types import Floats, Sequences
from tests import limits
from tests.engines.plain import token_statistics
from tests.engines.ranks import run_ranks
from tests.engines.training import TEMPERATURE, ZERO, score_sharded

LENGTHS = [9, 4, 14, 2, 6, 11, 3]
BUDGET = 14


@pytest.fixture(scope="module")
def sequences() -> Sequences:
    generator = np.random.default_rng(1)
    return packing.concatenate(
        [generator.integers(0, 250, length).astype(np.int32) for length in LENGTHS],
        [np.arange(length) >= 2 for length in LENGTHS],
    )


@pytest.fixture(scope="module")
def direct(small_model: Path, sequences: Sequences) -> Floats:
    """Return log-probs from transformers' logits in float64, from one forward pass per sequence, [T]."""
    model = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float64)
    with torch.no_grad():
        return spread_to_tokens(token_statistics(model, sequences, TEMPERATURE)[0], sequences)


def parts(sequences: Sequences, ranks: int) -> list[list[Sequences]]:
    """Return the micro-batches of each rank."""
    shares = packing.split_to_budget(LENGTHS, ranks, BUDGET).ranks
    return [[packing.select(sequences, indices) for indices in forwards] for forwards in shares]


def gathered(sequences: Sequences, ranks: int, by_rank: list[list[Floats]]) -> Floats:
    """Return the ranks' log-probs as one array in the order of the sequences, [T]."""
    out = np.full(len(sequences.token_ids), np.nan, np.float32)
    for forwards, fields in zip(packing.split_to_budget(LENGTHS, ranks, BUDGET).ranks, by_rank, strict=True):
        for indices, field in zip(forwards, fields, strict=True):
            assert field.dtype == np.float32
            if indices:
                out[packing.token_positions(sequences.offsets, indices)] = field
            else:
                assert not field.any()
    return out


def test_hf_infer_scores_as_transformers_does(small_model: Path, sequences: Sequences, direct: Floats) -> None:
    rank = Rank("reference", 0, 1, "127.0.0.1", 0, "cpu", limits.START)
    strategy = HfScore(
        HfScoreSettings(str(small_model), ModelConfig.model_validate({"dtype": "fp32"}), PackedPolicy), rank
    )
    for parameter in strategy._policy.parameters():
        parameter.data = parameter.data.clone()  # no longer backed by the file, as on a device
    for _ in range(2):
        strategy.offload()
        assert not any(parameter.untyped_storage().nbytes() for parameter in strategy._policy.parameters())
        strategy.onload()
    scored = strategy.log_probs(parts(sequences, 1)[0], TEMPERATURE)
    strategy.close()
    np.testing.assert_allclose(gathered(sequences, 1, [scored]), direct, atol=2e-5)
    assert not gathered(sequences, 1, [scored])[~sequences.response_mask].any()


def test_deepspeed_infer_scores_as_transformers_does(
    small_model: Path, sequences: Sequences, direct: Floats, tmp_path: Path
) -> None:
    ranks = 2
    by_rank = run_ranks(score_sharded, ranks, tmp_path, small_model, parts(sequences, ranks), ZERO[3])
    np.testing.assert_allclose(gathered(sequences, ranks, by_rank), direct, atol=2e-5)
