"""Checks tensor parallelism against the ranks, the model and the role's other keys.

Each restriction was observed in a run or is stated by DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll.config.checks.deepspeed import role_deepspeed_config
from roll.config.derived.model_shape import ModelShape
from roll.config.derived.placement import model_roles, sequence_parallel, uneven_replicas
from roll.config.schema.engine import DeepSpeedConfig, DeepSpeedInferStrategyConfig, TensorParallelConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.roles import RoleConfig
from roll.errors import Fault
from roll.registry import nearest

KEYS = list(TensorParallelConfig.model_fields)
BY_PLAN = "transformers' tensor-parallel plan of the model determines what is sharded"
WHOLE_HEAD = "log-probs need the whole matrix of the head, so each rank keeps it"
REFUSED: Mapping[str, str] = {
    "partition_config": BY_PLAN,
    "preset_model": BY_PLAN,
    "injection_policy_tuple": BY_PLAN,
    "vocab_parallel_lm_head": WHOLE_HEAD,
    "vocab_parallel_ce_backend": WHOLE_HEAD,
    "tp": "autotp_size sets it",
    "dtype": "model_args.dtype sets it",
}
"""Keys of DeepSpeed's block `tensor_parallel` that are refused, with the reason."""


def tensor_parallel_faults(config: Config, shapes: Mapping[str, ModelShape]) -> list[Fault]:
    """Return a fault for each conflict with tensor parallelism.

    Args:
        shapes: The shapes, by role, of models on this machine. Other models are checked when they are loaded.
    """
    faults: list[Fault] = []
    for name, role in model_roles(config).items():
        settings = role_deepspeed_config(role)
        if settings and settings.tensor_parallel:
            where = f"{name}.strategy_args.strategy_config.tensor_parallel"
            faults += _keys(settings, where)
            if settings.tensor_parallel_size > 1:
                faults += [
                    *_combined(settings, where, name, role),
                    *_shared_out(settings.tensor_parallel_size, where, shapes.get(name)),
                ]
    return faults


def uneven(shape: ModelShape | None, size: int) -> str | None:
    """Return why a model's layers cannot be split evenly over `size` ranks, or None if they can or if the shape is
    unknown.
    """
    if shape is None:
        return None
    if shape.delta:
        return (
            f"{shape.delta.layers} of the model's {shape.num_hidden_layers} layers use the delta rule, which AutoTP "
            f"cannot split"
        )
    if shape.num_key_value_heads % size or shape.num_attention_heads % size:
        heads = f"{shape.num_attention_heads} attention and {shape.num_key_value_heads} key-value heads"
        return f"the model's {heads} cannot be split over {size} ranks"
    inner = shape.intermediate_size
    return f"the model's MLP of width {inner} cannot be split over {size} ranks" if inner % size else None


def _keys(settings: DeepSpeedConfig, where: str) -> Iterator[Fault]:
    assert settings.tensor_parallel is not None
    for key, value in (settings.tensor_parallel.model_extra or {}).items():
        why = REFUSED.get(key)
        problem = f"{value!r}, but {why}" if why else f"unknown key, with the value {value!r}{nearest(key, KEYS)}"
        yield Fault(f"{where}.{key}", problem, f"remove it; the block has the keys {' and '.join(KEYS)}")


def _combined(settings: DeepSpeedConfig, where: str, name: str, role: RoleConfig) -> Iterator[Fault]:
    """Check the size against the role's other keys."""
    size, stage, dtype = settings.tensor_parallel_size, settings.zero_optimization.stage, role.model_args.dtype
    where = f"{where}.autotp_size"
    if isinstance(role.strategy_args, DeepSpeedInferStrategyConfig):
        yield Fault(
            where, f"{size}, but deepspeed_infer shards the model with ZeRO-3", "remove it; only deepspeed_train has it"
        )
        return
    if stage == 3:
        problem = f"{size}, but transformers cannot load weights into a model that both ZeRO-3 and AutoTP shard"
        yield Fault(where, problem, "use stage 1 or 2, or remove it: ZeRO-3 alone shards the weights over all ranks")
    if stage == 0 and dtype == "bf16":
        problem = f"{size}, but in bf16 DeepSpeed's stage 0 clips by the norm of only a part of the gradient"
        yield Fault(where, problem, "use stage 1 or 2")
    elif dtype == "fp16":
        yield Fault(
            where, f"{size}, but AutoTP is only tested with bf16 and fp32", f"set {name}.model_args.dtype to bf16"
        )
    if role.model_args.lora_target:
        problem = f"{size}, but AutoTP replaces adapted layers by its own, so the adapters are lost"
        remedy = (
            f"remove it, or remove {name}.model_args.lora_target; if the model is too large for one rank, train LoRA "
            f"with ZeRO-3"
        )
        yield Fault(where, problem, remedy)
    if sequence_parallel(role) > 1:
        problem = (
            f"{size}, but sequence_parallel_size is {sequence_parallel(role)}, and both would use the same "
            f"neighbouring ranks"
        )
        yield Fault(where, problem, "set only one of the two")
    yield from uneven_replicas(where, name, role, size)


def _shared_out(size: int, where: str, shape: ModelShape | None) -> Iterator[Fault]:
    if why := uneven(shape, size):
        remedy = (
            "remove it: ZeRO-3 shards the weights of every layer"
            if shape and shape.delta
            else "set it to a divisor of all of them"
        )
        yield Fault(f"{where}.autotp_size", f"{size}, but {why}", remedy)
