"""Settings of the strategies of DeepSpeed.

The driver creates settings and sends them to a worker, which calls `build`. Importing this module imports no backend.
Only `build` imports the strategy, in the process that runs it. Functions and classes in settings are pickled by name,
so they must be defined at the top level of a module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll.backend_settings import ModelLoader, ModelWrapper, choose_algorithms
from roll.config.schema.engine import DeepSpeedConfig
from roll.config.schema.model import ModelConfig, TrainingConfig

if TYPE_CHECKING:
    from roll.backend import Rank, TeachStrategy, TrainStrategy


@dataclass(frozen=True)
class TrainSettings:
    """Settings of `DeepSpeedTrain`."""

    model_path: str
    model_args: ModelConfig
    training: TrainingConfig
    deepspeed: DeepSpeedConfig
    max_grad_norm: float
    total_updates: int
    """Number of optimizer updates in the whole run. The learning-rate schedule spans them."""
    token_budget: int
    """Initial token budget of a micro-batch. The memory guard may lower it."""
    seed: int
    load: ModelLoader
    deterministic: bool = False
    """Whether to use torch's deterministic algorithms."""
    takes_turns: bool = False
    """Whether other roles use the role's devices while it does not train."""
    ends: tuple[int, ...] = ()
    """Tokens that end a turn of the template, for the export's generation_config."""

    def build(self, rank: Rank) -> TrainStrategy:
        """See `Settings`."""
        choose_algorithms(self.deterministic)
        from roll.training.deepspeed.strategy import DeepSpeedTrain

        return DeepSpeedTrain(self, rank)


@dataclass(frozen=True)
class ShardedScoreSettings:
    """Settings of `DeepSpeedScore`."""

    model_path: str
    model_args: ModelConfig
    deepspeed: DeepSpeedConfig
    wrap: ModelWrapper
    deterministic: bool = False
    """See `TrainSettings.deterministic`."""

    def build(self, rank: Rank) -> TeachStrategy:
        """See `Settings`."""
        choose_algorithms(self.deterministic)
        from roll.training.deepspeed.score import DeepSpeedScore

        return DeepSpeedScore(self, rank)
