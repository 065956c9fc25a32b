"""Checks sequence parallelism against the ranks, the backend and the heads of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll.config.derived.model_shape import ModelShape, uneven_heads
from roll.config.derived.placement import model_roles, sequence_parallel, uneven_replicas
from roll.config.schema.engine import DeepSpeedInferStrategyConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.roles import RoleConfig
from roll.errors import Fault


def sequence_parallel_faults(config: Config, shapes: Mapping[str, ModelShape]) -> list[Fault]:
    """Return faults of sizes that do not fit a role.

    Args:
        shapes: The shapes, by role, of models on this machine. Other models are checked when they are loaded.
    """
    return [fault for name, role in model_roles(config).items() for fault in _faults(name, role, shapes.get(name))]


def _faults(name: str, role: RoleConfig, shape: ModelShape | None) -> Iterator[Fault]:
    where, strategy, size = (
        f"{name}.strategy_args.strategy_config.sequence_parallel_size",
        role.strategy_args,
        sequence_parallel(role),
    )
    if isinstance(strategy, DeepSpeedInferStrategyConfig) and strategy.strategy_config.sequence_parallel_size > 1:
        given = strategy.strategy_config.sequence_parallel_size
        yield Fault(
            where,
            f"{given}, but deepspeed_infer scores whole sequences on each rank",
            "remove it; only deepspeed_train has it",
        )
    yield from uneven_replicas(where, name, role, size)
    if shape and shape.delta and size > 1:
        problem = (
            f"{size}, but {shape.delta.layers} of the model's {shape.num_hidden_layers} layers pass states from "
            f"token to token"
        )
        remedy = "remove it; to save memory, lower max_tokens_per_microbatch, or set gradient_checkpointing to all"
        yield Fault(where, problem, remedy)
    elif shape and (why := uneven_heads(shape.num_attention_heads, shape.num_key_value_heads, size)):
        yield Fault(where, f"{size}, but {why}", f"set it to a divisor of {shape.num_attention_heads}")
