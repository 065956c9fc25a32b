"""ROLL's files of RLVR with pictures: what its start script fixes is set and said, and other files are refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from roll.config.load.loader import read_config
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import ConfigError
from tests.faults import coded

REWARDS = "roll.pipeline.rlvr.rewards"
MATH = f"{REWARDS}.math_rule_reward_worker.MathRuleRewardWorker"
DETECTION = f"{REWARDS}.detection_reward_worker.DetectionRewardWorker"
FILE: dict[str, Any] = {
    "exp_name": "seeing",
    "output_dir": "output",
    "logging_dir": "logs",
    "logging_steps": 1,
    "is_num_return_sequences_expand": True,
    "pretrain": "Qwen/Qwen2.5-VL-7B-Instruct",
    "rollout_batch_size": 32,
    "num_return_sequences_in_group": 8,
    "prompt_length": 64,
    "response_length": 64,
    "adv_estimator": "grpo",
    "validation": {"data_args": {"file_name": ["test.parquet"]}},
    "actor_train": {
        "model_args": {"dtype": "bf16"},
        "training_args": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 64},
        "data_args": {"file_name": ["train.parquet"], "messages": "prompt"},
        "strategy_args": {
            "strategy_name": "megatron_train",
            "strategy_config": {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
        },
        "device_mapping": "list(range(0,8))",
    },
    "actor_infer": {
        "strategy_args": {"strategy_name": "vllm", "strategy_config": {"disable_mm_preprocessor_cache": True}},
        "device_mapping": "list(range(0,8))",
    },
    "rewards": {
        "math": {"worker_cls": MATH, "tag_included": ["mm_math"]},
        "cv": {"worker_cls": DETECTION, "tag_included": ["coco"]},
    },
}


def changed(changes: dict[str, Any]) -> DictConfig:
    """Return the file with changes."""
    merged = OmegaConf.merge(FILE, changes)
    assert isinstance(merged, DictConfig)
    return merged


def read(changes: dict[str, Any]) -> tuple[RlvrConfig, list[str]]:
    """Return the configuration of the file with changes, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = read_config(changed(changes))
    assert isinstance(loaded.config, RlvrConfig) and not loaded.faults, loaded.faults
    return loaded.config, [str(one.message) for one in caught]


def test_columns_and_steps_of_start_script_are_set() -> None:
    config, said = read({})
    learnt, held_out = config.actor_train.data_args, config.validation and config.validation.data_args
    assert learnt is not None and held_out is not None and config.max_steps == 500
    for rows in (learnt, held_out):
        assert (rows.messages, rows.images, rows.tag) == ("prompt", "images", "data_source")
        assert rows.ground_truth == "reward_model.ground_truth"
    for key in ("images", "tag", "ground_truth"):
        assert sum(text.startswith(f"actor_train.data_args.{key}: missing") for text in said) == 1, key
    assert sum("preprocessor_config.json" in text for text in said) == 1


def test_columns_that_are_set_stay() -> None:
    config, _ = read({"actor_train": {"data_args": {"messages": "asked", "images": "seen", "tag": "kind"}}})
    rows = config.actor_train.data_args
    assert rows is not None and (rows.messages, rows.images, rows.tag) == ("asked", "seen", "kind")


def test_boxes_of_qwen2_5_are_in_pixels() -> None:
    config, said = read({})
    assert config.rewards["cv"].reward == "detection" and config.rewards["math"].reward == "math_rule"
    assert config.rewards["cv"].reward_args == {"pixels_to": 1000}
    assert any(text.startswith("rewards.cv.reward_args.pixels_to") for text in said)
    other, _ = read({"pretrain": "Qwen/Qwen3-VL-4B-Thinking"})
    assert not other.rewards["cv"].reward_args


def test_sequences_with_pictures_are_not_split() -> None:
    config, said = read({})
    strategy = config.actor_train.strategy_args
    assert strategy.traits.sequence_parallel == 1
    assert any("context_parallel_size 2 is left out" in text for text in said)
    assert config.actor_train.training_args.gradient_accumulation_steps == 16, "2 replicas in ROLL are 8 here"


@pytest.mark.parametrize(
    ("prefix", "frozen"),
    [("vision_model", "all"), ("vision_model.blocks,vision_model.patch_embed", "tower")],
)
def test_frozen_parts_are_those_of_tower(prefix: str, frozen: str) -> None:
    config, said = read({"actor_train": {"model_args": {"freeze_module_prefix": prefix}}})
    assert config.actor_train.model_args.freeze_vision == frozen
    assert any(text.startswith("actor_train.model_args.freeze_module_prefix") for text in said)


def test_cache_of_old_vllm_has_new_name() -> None:
    config, said = read({})
    strategy: Any = config.actor_infer.strategy_args
    assert strategy.strategy_config.engine_args == {"mm_processor_cache_gb": 0}
    assert any("disable_mm_preprocessor_cache" in text for text in said)
    off: dict[str, Any] = {"strategy_args": {"strategy_config": {"disable_mm_preprocessor_cache": False}}}
    strategy = read({"actor_infer": off})[0].actor_infer.strategy_args
    assert not strategy.strategy_config.engine_args


def test_own_file_with_seeing_model_is_not_translated() -> None:
    own = changed({"max_steps": 3})
    own.rewards = {"math": {"reward": "math_rule", "tag_included": ["mm_math"]}}
    zero = {"zero_optimization": {"stage": 3}}
    own.actor_train.strategy_args = {"strategy_name": "deepspeed_train", "strategy_config": zero}
    own.actor_infer.strategy_args = {"strategy_name": "vllm"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = read_config(own).config
    assert isinstance(config, RlvrConfig) and config.actor_train.data_args is not None
    assert config.actor_train.data_args.images is None


MANAGER = "roll.pipeline.agentic.env_manager.vl_traj_env_manager.VLTrajEnvManager"


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"pretrain": "Qwen/Qwen3-Omni-30B-A3B-Thinking"}, "pretrain"),
        ({"pretrain": "Qwen/Qwen3-VL-30B-A3B-Instruct"}, "pretrain"),
        ({"pretrain": "Qwen/Qwen3.5-27B"}, "pretrain"),
        ({"custom_envs": {"Sokoban": {"env_type": "sokoban", "env_manager_cls": MANAGER}}}, "custom_envs"),
        ({"student": {"data_args": {"template": "qwen2-vl"}}}, "student.data_args.template"),
        ({"actor_train": {"model_args": {"max_pixels": 5}}}, "actor_train.model_args.max_pixels"),
    ],
)
def test_file_without_counterpart_is_refused_by_name(changes: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(changed(changes))
    assert coded(caught.value.faults) == [("not_supported", place)]
