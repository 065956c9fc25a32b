"""Checks hybrid models, whose gated-delta layers pass states from token to token, against the engines that generate
with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll.config.derived.model_shape import ModelShape
from roll.config.derived.placement import model_roles, sends_adapter, vllm_config
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import Fault


def hybrid_faults(config: Config, shapes: Mapping[str, ModelShape]) -> Iterator[Fault]:
    """Yield faults of settings that vLLM's CPU backend does not support for hybrid models.

    Args:
        shapes: The shapes, by role, of models on this machine.
    """
    for name, role in model_roles(config).items():
        shape = shapes.get(name)
        engine = vllm_config(role)
        if shape is None or shape.delta is None or engine is None or role.device_mapping is not None:
            continue
        if engine.enable_prefix_caching:
            where = f"{name}.strategy_args.strategy_config.enable_prefix_caching"
            problem = (
                "true, but vLLM caches prefixes of a hybrid model only with chunked prefill, which it does not do on "
                "the CPU"
            )
            yield Fault(where, problem, "set it to false")
        if role.model_args.dtype != "bf16":
            problem = f"{role.model_args.dtype}, but on the CPU vLLM's kernel for the delta rule only supports bf16"
            yield Fault(
                f"{name}.model_args.dtype",
                problem,
                f"set it to bf16, or {name}.strategy_args.strategy_name to hf_infer",
            )
        if name == "actor_infer" and isinstance(config, RlvrConfig) and sends_adapter(config):
            problem = "adapter, but on the CPU vLLM does not support adapters on gated-delta layers"
            yield Fault("weight_sync.lora", problem, "set it to merged")
