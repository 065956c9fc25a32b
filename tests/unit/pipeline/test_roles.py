"""What the roles are told of the models that they train."""

from __future__ import annotations

import pytest

from benchmarks.models import SHAPES, build_config
from roll.config.derived.model_shape import ModelShape, shape_of
from roll.config.schema.model import ModelConfig
from roll.models.flops import TrainingFlops
from roll.models.load import load_policy
from roll.models.score import load_scores
from roll.pipeline.roles import training_flops

HEAD = SHAPES["7b"]["vocab_size"] * SHAPES["7b"]["hidden_size"]


@pytest.fixture(scope="module")
def seven_billion() -> ModelShape:
    shape = shape_of(build_config("7b").to_dict())
    assert shape
    return shape


def model_args(**keys: object) -> ModelConfig:
    return ModelConfig.model_validate({"dtype": "bf16", **keys})


def test_all_parameters_learn_or_the_adapter_alone(seven_billion: ModelShape) -> None:
    count = seven_billion.parameters
    assert training_flops(seven_billion, model_args(), load_policy) == TrainingFlops(count, count, 4 * 28 * 3584)
    adapter = 28 * 8 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    adapted = training_flops(seven_billion, model_args(lora_target="all-linear", lora_rank=8), load_policy)
    assert adapted == TrainingFlops(count + adapter, adapter, 4 * 28 * 3584)


def test_a_reward_model_has_a_head_of_one_number(seven_billion: ModelShape) -> None:
    found = training_flops(seven_billion, model_args(), load_scores)
    assert found and found.parameters == found.trained == seven_billion.parameters - HEAD + SHAPES["7b"]["hidden_size"]


def test_fp32_has_no_place_against_a_peak_of_bf16(seven_billion: ModelShape) -> None:
    assert training_flops(seven_billion, model_args(dtype="fp32"), load_policy) is None
