"""Checks the size of attention heads against vLLM's kernel on the CPU, which would otherwise fail at the first
request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll.config.derived.model_shape import ModelShape
from roll.config.derived.placement import model_roles, vllm_config
from roll.config.schema.pipelines import Config
from roll.errors import Fault

CPU_HEADS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes for which vLLM 0.32's attention on the CPU has a kernel. A test asks the kernel for each size."""


def head_size_faults(config: Config, shapes: Mapping[str, ModelShape]) -> Iterator[Fault]:
    """Yield a fault for each model that vLLM cannot run on the CPU because of the size of its heads.

    Args:
        shapes: The shapes, by role, of models on this machine. Models with latent attention use another kernel.
    """
    for name, role in model_roles(config).items():
        shape = shapes.get(name)
        on_cpu = vllm_config(role) is not None and role.device_mapping is None
        if shape is None or not on_cpu or shape.latent_attention or shape.head_dim in CPU_HEADS:
            continue
        sizes = ", ".join(map(str, CPU_HEADS))
        problem = (
            f"vllm, but its attention on the CPU has no kernel for heads of size {shape.head_dim}; it has them for "
            f"{sizes}"
        )
        yield Fault(
            f"{name}.strategy_args.strategy_name",
            problem,
            "use hf_infer, a GPU (device_mapping), or a model with other heads",
        )
