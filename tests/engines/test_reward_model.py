"""Contract test of `RewardStrategy` for `HfReward` and `VllmReward`: both return the score that transformers
computes.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, Qwen2ForSequenceClassification

from examples.tiny.make_model import PAD_ID
from roll.backend import Rank
from roll.config.schema.model import ModelConfig
from roll.engines.hf.settings import HfRewardSettings
from roll.engines.vllm.settings import VllmConfig, VllmRewardSettings
from roll.errors import DataError
from roll.types import Ints
from tests import limits

FP32 = ModelConfig.model_validate({"dtype": "fp32"})
LENGTHS = [9, 4, 14, 2, 6, 11, 3, 40]
BUDGET = 20
RANK = Rank("rewards.r", 0, 1, "127.0.0.1", 0, "cpu", limits.START)


@pytest.fixture(scope="module")
def classifier(with_head: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a reward model: transformers' sequence classification class with one label."""
    folder = tmp_path_factory.mktemp("models") / "classifier"
    model = AutoModelForSequenceClassification.from_pretrained(with_head, num_labels=1)
    model.config.pad_token_id = PAD_ID
    model.save_pretrained(folder)
    for file in with_head.glob("*token*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def sequences() -> list[Ints]:
    generator = np.random.default_rng(2)
    return [generator.integers(0, 250, length).astype(np.int32) for length in LENGTHS]


@pytest.fixture(scope="module")
def direct(classifier: Path, sequences: list[Ints]) -> list[float]:
    """Return transformers' logits in float64, from one forward pass per sequence."""
    model = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float64)
    assert isinstance(model, Qwen2ForSequenceClassification)
    with torch.no_grad():
        return [model(torch.from_numpy(tokens.astype(np.int64))[None]).logits.item() for tokens in sequences]


def test_hf_infer_scores_as_transformers_does(classifier: Path, sequences: list[Ints], direct: list[float]) -> None:
    async def run() -> None:
        strategy = HfRewardSettings(str(classifier), FP32, BUDGET).build(RANK)
        await strategy.start()
        assert await strategy.scores(sequences) == pytest.approx(direct, abs=2e-5)
        await strategy.offload()
        await strategy.onload()
        # Concurrent calls with one sequence each.
        alone = await asyncio.gather(*(strategy.scores([tokens]) for tokens in sequences))
        assert [score for (score,) in alone] == pytest.approx(direct, abs=2e-5)
        await strategy.close()

    assert max(direct) - min(direct) > 0.1, "the scores must differ for the comparison to mean anything"
    asyncio.run(run())


@pytest.fixture
def quiet() -> Iterator[None]:
    """Set the environment variables that the worker layer sets for an engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.mark.full
@pytest.mark.usefixtures("quiet")
def test_vllm_scores_as_transformers_does(classifier: Path, sequences: list[Ints], direct: list[float]) -> None:
    async def run() -> None:
        engine = VllmConfig.model_validate({"enforce_eager": True, "kv_cache_gib": 0.25})
        strategy = VllmRewardSettings(str(classifier), FP32, engine, 1024, 0, takes_turns=False).build(RANK)
        await strategy.start()
        try:
            assert await strategy.scores(sequences) == pytest.approx(direct, abs=1e-4)
        finally:
            await strategy.close()

    asyncio.run(run())


def test_a_language_model_is_no_reward_model(small_model: Path, classifier: Path, tmp_path: Path) -> None:
    async def start(folder: Path) -> None:
        await HfRewardSettings(str(folder), FP32, BUDGET).build(RANK).start()

    with pytest.raises(DataError, match="config.json has 2 labels"):
        asyncio.run(start(small_model))
    headless = tmp_path / "headless"
    shutil.copytree(small_model, headless)
    shutil.copy(classifier / "config.json", headless / "config.json")
    with pytest.raises(DataError, match="no head 'score'"):
        asyncio.run(start(headless))
