"""Checks the key `batch_invariant`: what vLLM's batch-invariant kernels lack. Does not import vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.derived.model_shape import ModelShape
from roll.config.schema.roles import RewardModelRole, RoleConfig
from roll.engines.vllm.settings import VllmConfig
from roll.errors import Fault

GRAPHS = "compilation_config"


def invariance_faults(engine: VllmConfig, where: str, role: RoleConfig, shape: ModelShape | None) -> Iterator[Fault]:
    """Yield faults of the key `batch_invariant`, and of keys with which vLLM would not keep what it promises.

    As read in vLLM 0.32: without a GPU it ignores the variable. No backend for gated-delta layers supports it. In 8
    bits, some kernels are replaced by products in bf16 with weights that each call converts. As measured: with
    `cudagraph_mode: FULL`, two of four responses differed between alone and among 64.

    Args:
        where: place of the engine's block.
    """
    if not engine.batch_invariant:
        return
    place, remedy = f"{where}.batch_invariant", "set it to false"
    if role.device_mapping is None:
        problem = "true, but on the CPU vLLM has no such kernels"
        yield Fault(place, problem, "set it to false, or use GPUs (device_mapping)", "not_supported")
    if shape and shape.delta:
        problem = "true, but vLLM has no such kernel for gated-delta layers"
        yield Fault(place, problem, remedy, "not_supported")
    if GRAPHS in engine.engine_args:
        problem = "given with batch_invariant, but with other CUDA graphs responses depended on other requests"
        yield Fault(f"{where}.engine_args.{GRAPHS}", problem, "leave it out", "not_supported")
    untried = {
        "quantization": engine.quantization is not None,
        "speculative": engine.speculative is not None,
        "a reward model": isinstance(role, RewardModelRole),
        "a model that sees pictures": bool(shape and shape.vision),
    }
    if names := [what for what, is_given in untried.items() if is_given]:
        yield Fault(place, f"true, but it was not tried with {' or '.join(names)}", remedy, "not_supported")
