"""The types of the key `strategy_args`: which strategies a role may have."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, Union, get_args

from pydantic import Field

from roll.config.schema.backend import BACKENDS, StrategyConfig


def strategies(*methods: str) -> tuple[type[StrategyConfig], ...]:
    """Return the blocks of all backends that have these methods of `roll/backend_settings.py`."""
    kinds = [kind for name in BACKENDS for kind in vars(import_module(name)).values() if isinstance(kind, type)]
    blocks = [kind for kind in kinds if issubclass(kind, StrategyConfig) and kind.__module__ in BACKENDS]
    return tuple(block for block in blocks if all(hasattr(block, method) for method in methods))


def strategy_names(*methods: str) -> tuple[str, ...]:
    """Return the values of `strategy_name` of these blocks (see `strategies`)."""
    types = [block.model_fields["strategy_name"].annotation for block in strategies(*methods)]
    return tuple(name for kind in types for name in get_args(kind))


def serving_names() -> tuple[str, ...]:
    """Return the values of `strategy_name` that serve models with fixed weights. A server outside a run does not."""
    return strategy_names("generate_settings", "reward_settings")


def strategies_with(*methods: str) -> Any:
    """Return the type of a key `strategy_args` that takes the strategies with these methods."""
    blocks = strategies(*methods)
    return blocks[0] if len(blocks) == 1 else Annotated[Union[blocks], Field(discriminator="strategy_name")]  # noqa: UP007


if TYPE_CHECKING:
    AnyStrategy: TypeAlias = StrategyConfig
    TrainingStrategy: TypeAlias = StrategyConfig
    ScoringStrategy: TypeAlias = StrategyConfig
    GeneratingStrategy: TypeAlias = StrategyConfig
    ServingStrategy: TypeAlias = StrategyConfig
else:
    AnyStrategy = strategies_with()
    TrainingStrategy = strategies_with("train_settings")
    ScoringStrategy = strategies_with("score_settings")
    GeneratingStrategy = strategies_with("generate_settings")
    ServingStrategy = strategies_with("generate_settings", "reward_settings")
