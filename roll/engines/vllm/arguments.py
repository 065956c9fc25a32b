"""Arguments shared by all vLLM engines."""

from __future__ import annotations

import os
from typing import Any

from roll.engines.vllm.settings import VllmRewardSettings, VllmSettings

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def engine_arguments(settings: VllmSettings | VllmRewardSettings, device: str) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs`, without the user's `engine_args`."""
    engine = settings.engine
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": DTYPES[settings.model_args.dtype],
        "trust_remote_code": settings.model_args.trust_remote_code,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enforce_eager": engine.enforce_eager,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "load_format": engine.load_format,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "disable_custom_all_reduce": engine.disable_custom_all_reduce,
        "disable_log_stats": True,
    }
    if engine.block_size is not None:
        arguments["block_size"] = engine.block_size
    if device == "cpu":
        arguments["kv_cache_memory_bytes"] = int(engine.kv_cache_gib * 2**30)
        # vLLM 0.32 rewinds the generator of a seeded sample if its prompt spans two engine steps, which crashes the
        # engine on the CPU.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(engine.max_num_batched_tokens, settings.max_model_len)
    else:
        arguments["gpu_memory_utilization"] = engine.gpu_memory_utilization
        arguments["enable_sleep_mode"] = settings.takes_turns
    return arguments


def use_fp32_attention(settings: VllmSettings | VllmRewardSettings) -> None:
    """With fp32 models, stop Triton's attention kernels from rounding operands to tf32. Must be called before an engine
    starts.
    """
    if settings.model_args.dtype == "fp32":
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
