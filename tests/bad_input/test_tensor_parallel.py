"""Unsupported combinations with tensor parallelism, and DeepSpeed's other parallelism blocks: exit status 2, place,
value and remedy.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from roll.errors import Fault, FaultCode
from tests.faults import assert_fault

DEEPSPEED = "deepspeed_zero3"
SIZE = f"+{DEEPSPEED}.tensor_parallel.autotp_size=2"
STAGE = f"{DEEPSPEED}.zero_optimization.stage"
RANKS = "+actor_train.world_size=2"
SOUND = [SIZE, f"{STAGE}=2", RANKS]
BLOCK = "actor_train.strategy_args.strategy_config.tensor_parallel"
HEADS = "4 key-value heads"
ON_GPUS = ["+actor_train.device_mapping=[0,1]", "~actor_train.world_size"]
"""ZeRO++ quantises only on GPUs."""

CASES = [
    (
        [SIZE, RANKS, f"+{DEEPSPEED}.zero_optimization.offload_param.device=cpu"],
        f"{BLOCK}.autotp_size",
        "not_supported",
        "AutoTP with ZeRO-3 was not tested with offload_param",
        "use stage 1 or 2",
    ),
    (
        [*SOUND, f"{STAGE}=3", f"+{DEEPSPEED}.zero_optimization.zero_quantized_weights=true", *ON_GPUS],
        f"{BLOCK}.autotp_size",
        "not_supported",
        "not tested with zero_quantized_weights",
        "remove one of them",
    ),
    (
        [SIZE, RANKS, f"+{DEEPSPEED}.zero_optimization.zero_hpz_partition_size=2"],
        f"{BLOCK}.autotp_size",
        "not_supported",
        "not tested with zero_hpz_partition_size",
        "remove one of them",
    ),
    (
        [*SOUND, f"{STAGE}=0", "actor_train.model_args.dtype=bf16"],
        f"{BLOCK}.autotp_size",
        "not_supported",
        "in bf16 DeepSpeed's stage 0",
        "use stage 1 or 2",
    ),
    (
        [*SOUND, f"{STAGE}=0", "actor_train.model_args.dtype=fp16"],
        f"{BLOCK}.autotp_size",
        "not_supported",
        "in fp16 DeepSpeed's stage 0",
        "use stage 1 or 2",
    ),
    (
        [*SOUND, "+actor_train.model_args.lora_target=all-linear", "+actor_train.model_args.lora_dropout=0.1"],
        f"{BLOCK}.autotp_size",
        "exclusive",
        "lora_dropout is 0.1, and each rank of a replica would drop other values",
        "one of the two",
    ),
    *(
        (
            [*SOUND, "+actor_train.model_args.lora_target=all-linear", f"+actor_train.model_args.{key}={value}"],
            f"{BLOCK}.autotp_size",
            "exclusive",
            f"{key} is {value}, for which no rank has a whole matrix",
            "one of the two",
        )
        for key, value in (("use_dora", "true"), ("init_lora_weights", "pissa"))
    ),
    (
        [*SOUND, f"+{DEEPSPEED}.sequence_parallel_size=2"],
        f"{BLOCK}.autotp_size",
        "not_divisible",
        "2 x sequence_parallel_size 2, but actor_train has 2 rank(s)",
        "a divisor of the ranks",
    ),
    (
        [*SOUND, "actor_train.world_size=3"],
        f"{BLOCK}.autotp_size",
        "not_divisible",
        "2, but actor_train has 3 rank(s)",
        "a divisor of the ranks",
    ),
    (
        [*SOUND, f"{DEEPSPEED}.tensor_parallel.autotp_size=3", "actor_train.world_size=3"],
        f"{BLOCK}.autotp_size",
        "not_divisible",
        HEADS,
        "divisor",
    ),
    (
        [*SOUND, f"{DEEPSPEED}.tensor_parallel.autotp_size=-2"],
        f"{BLOCK}.autotp_size",
        "out_of_range",
        "-2",
        "at least 0",
    ),
    (
        [*SOUND, f"+{DEEPSPEED}.tensor_parallel.preset_model=qwen2"],
        f"{BLOCK}.preset_model",
        "not_supported",
        "transformers' tensor-parallel plan",
        "autotp_size and tp_overlap_comm",
    ),
    (
        [*SOUND, f"+{DEEPSPEED}.tensor_parallel.vocab_parallel_lm_head=true"],
        f"{BLOCK}.vocab_parallel_lm_head",
        "not_supported",
        "whole matrix",
        "remove it",
    ),
    (
        [*SOUND, f"+{DEEPSPEED}.tensor_parallel.autotp_sise=2"],
        f"{BLOCK}.autotp_sise",
        "unknown_key",
        "did you mean 'autotp_size'",
        "remove it",
    ),
    (
        [f"+{DEEPSPEED}.pipeline={{stages: 2}}"],
        "strategy_config.pipeline",
        "not_supported",
        "PipelineModule",
        "use ZeRO-3, tensor_parallel",
    ),
    (
        [f"+{DEEPSPEED}.autoep_size=2"],
        "strategy_config.autoep_size",
        "not_supported",
        "belongs in the block expert_parallel",
        "expert_parallel: {autoep_size",
    ),
    (
        [f"+{DEEPSPEED}.autotp_size=2"],
        "strategy_config.autotp_size",
        "not_supported",
        "belongs in the block tensor_parallel",
        "tensor_parallel: {autotp_size",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "place", "code", "value", "remedy"), CASES, ids=[" ".join(case[0])[-70:] for case in CASES]
)
def test_a_combination_is_refused(
    faults_of: Callable[..., tuple[Fault, ...]],
    overrides: list[str],
    place: str,
    code: FaultCode,
    value: str,
    remedy: str,
) -> None:
    assert_fault(faults_of(*overrides), place, code, value, remedy)
