"""Settings of the strategies. Only their `build` imports a strategy's module, in the process that runs it.

Importing this file imports no backend, so the driver makes settings, sends them to a worker, and the worker calls `build`.
Functions and classes among the settings travel by their name: they must stand in a module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from roll.config.schema.engine import DeepSpeedConfig, VllmConfig
from roll.config.schema.model import ModelConfig, TrainingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.models.load import PackedModel
    from roll.strategies.base import GenerateStrategy, Rank, RewardStrategy, TeachStrategy, TrainStrategy

S = TypeVar("S", covariant=True)
ModelLoader: TypeAlias = "Callable[[str, ModelConfig, int], PackedModel]"
"""Loads the trained model from its path, the model's keys and a seed. Its outputs for each token are the loss's inputs."""
ModelWrapper: TypeAlias = "Callable[[PreTrainedModel], PackedModel]"
"""Wraps a model whose forward pass returns log-probs, or a teacher's states."""


class Settings(Protocol[S]):
    """Settings that build a strategy on a rank."""

    def build(self, rank: Rank) -> S:
        """Import the strategy and build it."""
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
    """Number of optimizer updates of the whole run, after which the schedule ends."""
    token_budget: int
    """Token budget of a micro-batch in the plan."""
    seed: int
    load: ModelLoader
    deterministic: bool = False
    """Whether to use torch's deterministic algorithms."""

    def build(self, rank: Rank) -> TrainStrategy:
        """See `Settings`."""
        choose_algorithms(self.deterministic)
        from roll.strategies.deepspeed_train import DeepSpeedTrain

        return DeepSpeedTrain(self, rank)


@dataclass(frozen=True)
class VllmSettings:
    """Settings of `VllmGenerate`."""

    model_path: str
    model_args: ModelConfig
    engine: VllmConfig
    max_model_len: int
    adapter_rank: int | None
    """Rank of the adapters that will be loaded, None if the engine loads whole weights."""
    seed: int
    takes_turns: bool
    """Whether other roles use its devices while it does not generate."""
    keeps_kv_cache: bool
    """Whether a response that spans an update keeps its KV cache. Otherwise the cache is computed again."""

    def build(self, rank: Rank) -> GenerateStrategy:
        """See `Settings`."""
        from roll.strategies.vllm import VllmGenerate

        return VllmGenerate(self, rank)


@dataclass(frozen=True)
class HfGenerateSettings:
    """Settings of `HfGenerate`."""

    model_path: str
    model_args: ModelConfig

    def build(self, rank: Rank) -> GenerateStrategy:
        """See `Settings`."""
        from roll.strategies.hf_infer import HfGenerate

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
        from roll.strategies.hf_infer import HfScore

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
        from roll.strategies.deepspeed_infer import DeepSpeedScore

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
        from roll.strategies.hf_reward import HfReward

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
    """Whether other roles use its devices while it does not score."""

    def build(self, rank: Rank) -> RewardStrategy:
        """See `Settings`."""
        from roll.strategies.vllm_reward import VllmReward

        return VllmReward(self, rank)
