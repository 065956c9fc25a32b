"""Checks the arguments that a configuration passes on to vLLM's `AsyncEngineArgs`. Does not import vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll.config.schema.roles import RoleConfig
from roll.engines.vllm.settings import CACHE_ARGUMENT, VllmConfig
from roll.errors import Fault

OVER_WORKERS = ("pipeline_parallel_size", "prefill_context_parallel_size", "data_parallel_size", "nnodes")
"""Arguments that add workers to an engine, or hosts, for which roll places no devices."""
OF_ROLE = {"model": "model_name_or_path", "dtype": "dtype", "trust_remote_code": "trust_remote_code"}
"""Arguments that a key of the role's `model_args` sets."""
SET_BY_ROLL: Mapping[str, str] = {
    "seed": "the run's seed also seeds engines",
    "logprobs_mode": "losses need the log-probs of the distribution that was sampled from",
    "generation_config": "generating_args alone set the sampling",
    "quantization_config": "quantization decides what is quantised",
    "weight_transfer_config": "weights arrive by roll's own transfer",
    "enable_return_routed_experts": "router_replay asks for the routes of tokens",
    "speculative_config": "strategy_config has a block for it, speculative",
    "enable_lora": "weight_sync.lora decides whether an engine gets adapters",
    "max_loras": "an engine has one adapter",
    "max_lora_rank": "it follows from lora_rank",
    "enable_sleep_mode": "it follows from the roles that share the devices",
    "disable_log_stats": "roll reads the statistics itself",
    "runner": "it follows from the role",
    "convert": "it follows from the role",
}
"""Arguments that have no key, with the reason."""
SET_FOR_POLICY: Mapping[str, str] = {
    "mm_processor_kwargs": "the trainer reads pictures by the model's preprocessor_config.json alone",
}
"""Arguments that are free for judges only, with the reason."""
SET_ON_CPU: Mapping[str, str] = {
    CACHE_ARGUMENT: "on the CPU kv_cache_gib sets it",
    "enable_chunked_prefill": "on the CPU seeded samples would end the engine",
    "distributed_executor_backend": "on the CPU the model runs in the engine's own process",
}
"""Arguments that are free on GPUs only, with the reason."""
SET_UNCOMPILED: Mapping[str, str] = {
    "compilation_config": "compile_model is false",
}
"""Arguments that are free for an engine that compiles its model only, with the reason."""


def engine_args_faults(engine: VllmConfig, where: str, role_name: str, role: RoleConfig) -> Iterator[Fault]:
    """Yield a fault for each argument of `engine_args` that roll sets itself, or that makes samples or log-probs wrong.

    Args:
        where: place of the engine's block.
    """
    taken = {**SET_BY_ROLL, **(SET_ON_CPU if role.device_mapping is None else {})}
    taken |= SET_FOR_POLICY if role_name == "actor_infer" else {}
    taken |= {} if engine.compile_model else SET_UNCOMPILED
    for key, value in engine.engine_args.items():
        place = f"{where}.engine_args.{key}"
        if key in VllmConfig.model_fields:
            problem = f"{value!r}, but {key} is a key of strategy_config itself"
            yield Fault(place, problem, f"move it to {where}.{key}", "misplaced")
        elif key in OF_ROLE:
            problem = f"{value!r}, but {key} of an engine is that of its role"
            yield Fault(place, problem, f"set {role_name}.model_args.{OF_ROLE[key]}", "misplaced")
        elif key in OVER_WORKERS and value != 1:
            problem = f"{value!r}, but an engine has the devices of tensor_parallel_size only, on one node"
            remedy = "remove it; tensor_parallel_size shards an engine, and more devices make more engines"
            yield Fault(place, problem, remedy, "not_supported")
        elif key == CACHE_ARGUMENT and role.device_mapping is not None and (type(value) is not int or value <= 0):
            yield Fault(place, f"{value!r} is not a number of bytes", "give a positive integer", "wrong_type")
        elif key in taken:
            yield Fault(place, f"{value!r}, but roll sets it: {taken[key]}", "remove it", "not_supported")
