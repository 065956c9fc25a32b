"""Settings can be made without importing a backend, and can be pickled."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from roll.backend_settings import ModelLoader
from roll.config.schema.model import ModelConfig, TrainingConfig
from roll.engines.hf.settings import HfScoreSettings
from roll.engines.vllm.settings import VllmConfig, VllmSettings
from roll.models.load import load_policy
from roll.models.packed import PackedPolicy
from roll.models.student import PackedTeacher
from roll.models.value import load_scores, load_values
from roll.training.deepspeed.settings import DeepSpeedConfig, ShardedScoreSettings, TrainSettings
from tests import limits

MODEL_ARGS = ModelConfig.model_validate({"dtype": "bf16"})
DEEPSPEED = DeepSpeedConfig.model_validate({"zero_optimization": {"stage": 3}})
BACKENDS = ("torch", "transformers", "deepspeed", "vllm", "ray")


def test_importing_settings_imports_no_backend() -> None:
    code = f"import sys, roll.backend_settings; print([name for name in {BACKENDS} if name in sys.modules])"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=limits.PROCESS
    )
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize("load", [load_policy, load_values, load_scores])
def test_a_trainer_s_settings_travel(load: ModelLoader) -> None:
    training = TrainingConfig.model_validate({"learning_rate": 0.1})
    settings = TrainSettings(
        "model", MODEL_ARGS, training, DEEPSPEED, 1.0, total_updates=3, token_budget=64, seed=1, load=load
    )
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_the_other_settings_travel() -> None:
    for settings in (
        VllmSettings(
            "model", MODEL_ARGS, VllmConfig.model_validate({}), 64, None, 0, takes_turns=True, keeps_kv_cache=False
        ),
        HfScoreSettings("model", MODEL_ARGS, PackedTeacher),
        ShardedScoreSettings("model", MODEL_ARGS, DEEPSPEED, PackedPolicy),
    ):
        assert pickle.loads(pickle.dumps(settings)) == settings
