"""The backends of ROLL's files that roll does not have become those that it has, with updates of the same size."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.roll_v2.backends import settle_backends
from roll.config.roll_v2.translate import Translation

ONE = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1}


def role(strategy: str, sizes: dict[str, Any] | None, gpus: int = 16, **keys: Any) -> dict[str, Any]:
    """Return the block of a role."""
    return {
        "strategy_args": {"strategy_name": strategy, "strategy_config": sizes},
        "device_mapping": list(range(gpus)),
        **keys,
    }


def settled(name: str, block: dict[str, Any]) -> tuple[dict[str, Any], Translation]:
    """Return the translated block of a role, and the translation."""
    done = Translation({name: block})
    settle_backends(done)
    return done.values[name], done


def said(done: Translation, place: str) -> str:
    """Return the single warning about a key."""
    (found,) = [text for text in done.warnings if text.startswith(f"{place}: ")]
    return found


@pytest.mark.parametrize(
    ("sizes", "given", "settled_numbers"),
    [
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, (2, 16), (2, 4)),
        ({"context_parallel_size": 8, "expert_model_parallel_size": 4}, (2, 16), (2, 16)),
        ({"tensor_model_parallel_size": 2, "context_parallel_size": 2}, (1, 16), (1, 8)),
        ({"pipeline_model_parallel_size": 4}, (16, 1), (4, 1)),
        ({"pipeline_model_parallel_size": 4}, (None, None), (2, 1)),
        (ONE, (2, 16), (2, 16)),
    ],
)
def test_megatrons_updates_keep_their_size(
    sizes: dict[str, int], given: tuple[int | None, ...], settled_numbers: tuple[int, int]
) -> None:
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    arguments = {key: number for key, number in zip(keys, given, strict=True) if number is not None}
    block, done = settled("actor_train", role("megatron_train", sizes, training_args=arguments))
    assert done.faults == []
    shared = sizes.get("context_parallel_size", 1)
    config = block["strategy_args"]["strategy_config"]
    assert config["zero_optimization"] == {"stage": 3} and config.get("sequence_parallel_size", 1) == shared
    now = tuple(block["training_args"].get(key, default) for key, default in zip(keys, given, strict=True))
    assert now == settled_numbers
    in_roll = 16 // (shared * sizes.get("tensor_model_parallel_size", 1) * sizes.get("pipeline_model_parallel_size", 1))
    before = (given[0] or 8) * (given[1] or 1) * in_roll
    assert settled_numbers[0] * settled_numbers[1] * (16 // shared) == before
    for key, old, new in zip(keys, given, settled_numbers, strict=True):
        assert any(text.startswith(f"actor_train.training_args.{key}: ") for text in done.warnings) is (
            (old or {keys[0]: 8, keys[1]: 1}[key]) != new
        )


@pytest.mark.parametrize(
    ("devices", "accumulation"),
    [
        ({"gpus": 8}, 4),
        ({"gpus": 4}, 8),
        ({"gpus": 2}, 16),
        ({"gpus": 1}, 16),
        ({"device_mapping": None, "world_size": 4}, 8),
        ({"device_mapping": None}, 16),
    ],
)
def test_updates_keep_their_size_on_fewer_ranks(devices: dict[str, Any], accumulation: int) -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    numbers = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 16}
    block, done = settled("actor_train", role("megatron_train", sizes, training_args=dict(numbers), **devices))
    assert block["training_args"] == numbers | {"gradient_accumulation_steps": accumulation} and done.faults == []


def test_changed_update_size_is_said() -> None:
    numbers = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    sizes = {"tensor_model_parallel_size": 2}
    block, done = settled("actor_train", role("megatron_train", sizes, training_args=dict(numbers)))
    assert block["training_args"] == numbers
    text = said(done, "actor_train.training_args.gradient_accumulation_steps")
    assert "8 sequences in ROLL" in text and "16 here" in text


def test_replaced_sizes_and_ignored_keys_are_said() -> None:
    sizes = ONE | {
        "pipeline_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "recompute_granularity": "full",
    }
    _, done = settled("actor_train", role("megatron_train", sizes))
    text = said(done, "actor_train.strategy_args")
    for word in ("pipeline_model_parallel_size 2", "use_distributed_optimizer", "recompute_granularity", "fp32"):
        assert word in text


@pytest.mark.parametrize(
    ("key", "value", "is_fault"),
    [
        ("moe_expert_capacity_factor", 1.0, True),
        ("fp8", "hybrid", True),
        ("additional_configs", {"moe_permute_fusion": True}, False),
        ("additional_configs", {"moe_z_loss_coeff": 0.1}, True),
        ("moe_grouped_gemm", True, False),
    ],
)
def test_megatron_keys_that_change_results_are_faults(key: str, value: Any, is_fault: bool) -> None:
    _, done = settled("actor_train", role("megatron_train", ONE | {key: value}))
    places = [fault.place for fault in done.faults]
    assert places == ([f"actor_train.strategy_args.strategy_config.{key}"] if is_fault else [])


@pytest.mark.parametrize(
    ("strategy", "sizes", "expected"),
    [
        ("megatron_infer", ONE, {"strategy_name": "hf_infer"}),
        ("megatron_infer", None, {"strategy_name": "hf_infer"}),
        (
            "megatron_infer",
            ONE | {"expert_model_parallel_size": 8},
            {"strategy_name": "deepspeed_infer", "strategy_config": {"zero_optimization": {"stage": 3}}},
        ),
        (
            "fsdp2_infer",
            {"fsdp_size": 16, "offload_policy": True},
            {
                "strategy_name": "deepspeed_infer",
                "strategy_config": {
                    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}
                },
            },
        ),
    ],
)
def test_scoring_roles_use_one_gpu_or_shards(strategy: str, sizes: Any, expected: dict[str, Any]) -> None:
    block, done = settled("reference", role(strategy, sizes))
    assert block["strategy_args"] == expected and done.faults == []
    assert said(done, "reference.strategy_args")


def test_fsdp2_becomes_zero3_with_its_offload() -> None:
    sizes = {"fsdp_size": 16, "offload_policy": True, "reduce_dtype": "fp32", "sequence_parallel_size": 2}
    block, done = settled("actor_train", role("fsdp2_train", sizes, training_args={"gradient_accumulation_steps": 4}))
    config = block["strategy_args"]["strategy_config"]
    assert set(config["zero_optimization"]) == {"stage", "offload_optimizer", "offload_param"}
    assert config["sequence_parallel_size"] == 2 and config["communication_data_type"] == "fp32"
    assert block["training_args"] == {"gradient_accumulation_steps": 4} and done.faults == []


def test_sglang_keys_become_those_of_vllm() -> None:
    sizes = {"mem_fraction_static": 0.7, "load_format": "dummy", "tensor_parallel_size": 2}
    block, done = settled("actor_infer", role("sglang", sizes))
    assert block["strategy_args"] == {
        "strategy_name": "vllm",
        "strategy_config": {"gpu_memory_utilization": 0.7, "load_format": "dummy", "tensor_parallel_size": 2},
    }
    assert "gpu_memory_utilization" in said(done, "actor_infer.strategy_args")


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("megatron_train", {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 20}),
        ("deepspeed_train", {"lr_scheduler_type": "constant"}),
    ],
)
def test_constant_rate_warms_up_only_with_megatron(strategy: str, expected: dict[str, Any]) -> None:
    arguments = {"lr_scheduler_type": "constant", "warmup_steps": 20}
    block, done = settled("actor_train", role(strategy, {}, training_args=arguments))
    assert block["training_args"] == expected
    assert any(text.startswith("actor_train.training_args.") for text in done.warnings)


def test_deepspeeds_block_decides_precision_as_in_roll() -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    block, done = settled("actor_train", role("deepspeed_train", config, model_args={"dtype": "fp16"}))
    assert block["model_args"] == {"dtype": "bf16"} and said(done, "actor_train.model_args.dtype")
    block, done = settled("actor_train", role("megatron_train", ONE, model_args={"dtype": "fp16"}))
    assert block["model_args"] == {"dtype": "fp16"}
    assert "data_types" not in block["strategy_args"]["strategy_config"]
    block, done = settled("actor_train", role("megatron_train", ONE | {"bf16": True}, model_args={"dtype": "fp32"}))
    assert block["model_args"] == {"dtype": "bf16"} and said(done, "actor_train.model_args.dtype")


def test_the_routers_loss_of_megatron_is_said() -> None:
    sizes = ONE | {"expert_model_parallel_size": 8}
    place = "actor_train.training_args.router_aux_loss_coef"
    assert said(settled("actor_train", role("megatron_train", sizes))[1], place)
    _, done = settled("actor_train", role("megatron_train", sizes, training_args={"router_aux_loss_coef": 0.001}))
    assert not any(text.startswith(place) for text in done.warnings)


def test_adapters_on_experts_are_merged() -> None:
    model = {"lora_target": "all-linear"}
    sizes = ONE | {"expert_model_parallel_size": 4}
    _, done = settled("actor_train", role("megatron_train", sizes, model_args=model))
    assert done.values["weight_sync"] == {"lora": "merged"} and said(done, "weight_sync.lora")
