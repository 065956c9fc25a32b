"""Settings of the strategies of transformers.

The driver creates settings and sends them to a worker, which calls `build`. Importing this module imports no backend.
Only `build` imports the strategy, in the process that runs it. Functions and classes in settings are pickled by name,
so they must be defined at the top level of a module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll.backend_settings import ModelWrapper, choose_algorithms
from roll.config.schema.model import ModelConfig

if TYPE_CHECKING:
    from roll.backend import GenerateStrategy, Rank, RewardStrategy, TeachStrategy


@dataclass(frozen=True)
class HfGenerateSettings:
    """Settings of `HfGenerate`."""

    model_path: str
    model_args: ModelConfig

    def build(self, rank: Rank) -> GenerateStrategy:
        """See `Settings`."""
        from roll.engines.hf.strategy import HfGenerate

        return HfGenerate(self, rank)


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

        return HfScore(self, rank)


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
        from roll.engines.hf.reward import HfReward

        return HfReward(self, rank)
