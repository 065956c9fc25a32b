"""Settings of the strategies. The driver creates settings and sends them to a worker, which calls `build`.

Importing this module imports no backend. Only `build` imports a strategy, in the process that runs it.
Functions and classes in settings are pickled by name, so they must be defined at the top level of a module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from roll.config.schema.engine import DeepSpeedConfig, VllmConfig
from roll.config.schema.model import ModelConfig, TrainingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.backend import GenerateStrategy, Rank, RewardStrategy, TeachStrategy, TrainStrategy
    from roll.models.load import PackedModel

S = TypeVar("S", covariant=True)
ModelLoader: TypeAlias = "Callable[[str, ModelConfig, int], PackedModel]"
"""Function that loads the trained model from its path, its `model_args` and a seed. The model's outputs are passed to the loss."""
ModelWrapper: TypeAlias = "Callable[[PreTrainedModel], PackedModel]"
"""Function that wraps a loaded model, so that its forward pass returns log-probs or a teacher's states."""


class Settings(Protocol[S]):
    """Settings from which a worker builds its strategy."""

    def build(self, rank: Rank) -> S:
        """Import the strategy's module and return the strategy."""
        ...


def choose_algorithms(deterministic: bool) -> None:
    """Switch torch's deterministic algorithms on or off in this process."""
    import torch

    torch.use_deterministic_algorithms(deterministic)


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
class VllmSettings:
    """Settings of `VllmGenerate`."""

    model_path: str
    model_args: ModelConfig
    engine: VllmConfig
    max_model_len: int
    adapter_rank: int | None
    """LoRA rank of the adapters that the engine will load. None if it loads whole models."""
    seed: int
    takes_turns: bool
    """Whether other roles use the role's devices while it does not generate."""
    keeps_kv_cache: bool
    """Whether a response that spans a weight update keeps its KV cache. Otherwise, the cache is recomputed."""

    def build(self, rank: Rank) -> GenerateStrategy:
        """See `Settings`."""
        from roll.engines.vllm.strategy import VllmGenerate

        return VllmGenerate(self, rank)


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


@dataclass(frozen=True)
class VllmRewardSettings:
    """Settings of `VllmReward`."""

    model_path: str
    model_args: ModelConfig
    engine: VllmConfig
    max_model_len: int
    seed: int
    takes_turns: bool
    """Whether other roles use the role's devices while it does not score."""

    def build(self, rank: Rank) -> RewardStrategy:
        """See `Settings`."""
        from roll.engines.vllm.reward import VllmReward

        return VllmReward(self, rank)
