"""Every key of DeepSpeed is either accepted or refused, no other key is accepted, and `auto` leaves the choice to
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

from roll.config.schema.foreign_names import DEEPSPEED_BLOCKS
from roll.training.deepspeed.checks import OFFLOADS
from roll.training.deepspeed.settings import DeepSpeedConfig, ZeroOffloadConfig, ZeroOptimizationConfig
from roll.training.deepspeed.setup import engine_config


def defaults(model: Any) -> dict[str, Any]:
    return {
        field.alias or name: field.get_default(call_default_factory=True) for name, field in model.model_fields.items()
    }


THEIRS: Mapping[str, dict[str, Any]] = {
    "zero_optimization": defaults(DeepSpeedZeroConfig),
    "bf16": defaults(DeepSpeedBF16Config),
    "fp16": defaults(DeepSpeedFP16Config),
    "aio": dict(AIO_DEFAULT_DICT),
    "data_types": {"grad_accum_dtype": None},
}


@pytest.mark.parametrize("block", DEEPSPEED_BLOCKS)
def test_deepspeed_block_takes_or_refuses_every_key(block: str) -> None:
    taken, refused = DEEPSPEED_BLOCKS[block]
    schema = set(ZeroOptimizationConfig.model_fields) if block == "zero_optimization" else set()
    theirs = THEIRS[block]
    assert set(taken) <= set(theirs)
    assert set(theirs) <= set(taken) | set(refused) | schema
    assert not set(taken) & set(refused)


@pytest.mark.parametrize("block", DEEPSPEED_BLOCKS)
def test_deepspeed_defaults_fit_the_kinds_of_keys(block: str) -> None:
    for key, kind in DEEPSPEED_BLOCKS[block][0].items():
        chosen = THEIRS[block][key]
        assert chosen is None or key == "leaf_module" or kind.holds(chosen), key
        assert not kind.holds("some"), key


def test_an_offload_takes_the_keys_of_its_kind() -> None:
    ours = set(ZeroOffloadConfig.model_fields)
    for name, model in (
        ("offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
        ("offload_param", DeepSpeedZeroOffloadParamConfig),
    ):
        assert ours - set(OFFLOADS[name]) <= set(model.model_fields)
        assert not set(OFFLOADS[name]) & set(model.model_fields)


def test_auto_is_left_out_of_every_block() -> None:
    given = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 1e9},
        "fp16": {"enabled": "auto", "loss_scale_window": "auto", "hysteresis": 4},
        "aio": {"block_size": "auto"},
    }
    made = engine_config(DeepSpeedConfig.model_validate(given), "fp16", 1.0, compiled=False)
    assert made["zero_optimization"] == {"stage": 3, "sub_group_size": 1e9}
    assert made["fp16"] == {"enabled": True, "hysteresis": 4}
    assert made["aio"] == {}
