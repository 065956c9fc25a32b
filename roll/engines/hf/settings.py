"""The block of transformers in the configuration, and the settings of its strategies.

The driver creates settings and sends them to a worker, which calls `build`. Importing this module imports no backend.
Only `build` imports the strategy, in the process that runs it. Functions and classes in settings are pickled by name,
so they must be defined at the top level of a module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from roll.backend_settings import ModelWrapper, RoleModel, choose_algorithms, with_local_model
from roll.config.schema.backend import BackendTraits, StrategyConfig
from roll.config.schema.base import StrictConfig
from roll.config.schema.model import ModelConfig

if TYPE_CHECKING:
    from roll.backend import GenerateStrategy, Rank, RewardStrategy, TeachStrategy


@dataclass(frozen=True)
class HfGenerateSettings:
    """Settings of `HfGenerate`."""

    model_path: str
    model_args: ModelConfig
    seed: int

    def build(self, rank: Rank) -> GenerateStrategy:
        """See `Settings`."""
        from roll.engines.hf.strategy import HfGenerate

        return HfGenerate(with_local_model(self), rank)


@dataclass(frozen=True)
class HfScoreSettings:
    """Settings of `HfScore`."""

    model_path: str
    model_args: ModelConfig
    wrap: ModelWrapper
    deterministic: bool = False
    """See `TrainSettings.deterministic`."""

    def build(self, rank: Rank) -> TeachStrategy:
        """See `Settings`."""
        choose_algorithms(self.deterministic)
        from roll.engines.hf.strategy import HfScore

        return HfScore(with_local_model(self), rank)


@dataclass(frozen=True)
class HfRewardSettings:
    """Settings of `HfReward`."""

    model_path: str
    model_args: ModelConfig
    token_budget: int
    """Token budget of one forward pass."""
    deterministic: bool = False
    """See `TrainSettings.deterministic`."""

    def build(self, rank: Rank) -> RewardStrategy:
        """See `Settings`."""
        choose_algorithms(self.deterministic)
        from roll.engines.hf.strategy import HfReward

        return HfReward(with_local_model(self), rank)


class HfConfig(StrictConfig):
    """Settings of transformers, with one device per worker. There are no keys."""


class HfInferStrategyConfig(StrategyConfig):
    """Log-probs with transformers, and generation on machines without vLLM."""

    library: ClassVar[str] = "roll.engines.hf.strategy"

    strategy_name: Literal["hf_infer"] = Field(
        description="Compute log-probs with transformers; also generates if vLLM is not available, slowly."
    )
    strategy_config: HfConfig = Field(default_factory=HfConfig, description="Empty: this strategy has no settings.")

    @property
    def traits(self) -> BackendTraits:
        return BackendTraits(batches_by_tokens=True, own_kernels=False, loads_adapters=True)

    def generate_settings(
        self, model: RoleModel, context: int, adapter_rank: int | None, keeps_kv_cache: bool
    ) -> HfGenerateSettings:
        """See `GenerateBackend`."""
        return HfGenerateSettings(model.path, model.arguments, model.seed)

    def score_settings(self, model: RoleModel, wrap: ModelWrapper) -> HfScoreSettings:
        """See `ScoreBackend`."""
        return HfScoreSettings(model.path, model.arguments, wrap, model.deterministic)

    def reward_settings(self, model: RoleModel, context: int, token_budget: int | None) -> HfRewardSettings:
        """See `RewardBackend`."""
        assert token_budget is not None
        return HfRewardSettings(model.path, model.arguments, token_budget, model.deterministic)
