"""What the settings of all strategies have in common. Each backend has its own settings beside its strategies.

A backend's block in the configuration implements the protocol of each job that it can do: `TrainBackend` and others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from roll.config.schema.model import ModelConfig, TrainingConfig
from roll.stores.models import local_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.backend import GenerateStrategy, Rank, RewardStrategy, TeachStrategy, TrainStrategy
    from roll.models.packed import PackedModel

S = TypeVar("S", covariant=True)
T = TypeVar("T", bound=Any)
ModelLoader: TypeAlias = "Callable[[str, ModelConfig, int], PackedModel]"
"""Function that loads the trained model from its path, `model_args` and a seed. The loss gets the model's outputs."""
ModelWrapper: TypeAlias = "Callable[[PreTrainedModel], PackedModel]"
"""Function that wraps a loaded model, so that its forward pass returns log-probs or a teacher's states."""


class Settings(Protocol[S]):
    """Settings from which a worker builds its strategy."""

    def build(self, rank: Rank) -> S:
        """Import the strategy's module and return the strategy."""
        ...


def with_local_model(settings: T) -> T:
    """Return settings whose `model_path` is on this host: a model in a store is downloaded, once to each host.

    Raises:
        StoreError: it cannot be downloaded, or is no longer the version that the run started with.
    """
    return replace(settings, model_path=local_model(settings.model_path))


@dataclass(frozen=True)
class RoleModel:
    """The model of a role, and the keys of the run that every strategy needs."""

    path: str
    """Hub name, absolute folder, or address in a store with its version."""
    arguments: ModelConfig
    seed: int
    deterministic: bool
    """Whether to use torch's deterministic algorithms."""
    takes_turns: bool
    """Whether other roles use the role's devices while it does not work."""
    replays_routes: bool = False
    """Whether the engine returns the routes of its tokens, and the trainer replays them (`router_replay`)."""
    average_rate: float | None = None
    """Share of the newest weights in a moving average, which a self-teacher uses. None: no average is kept."""


class TrainBackend(Protocol):
    """A block `strategy_args` for roles that are trained."""

    def train_settings(
        self,
        model: RoleModel,
        training: TrainingConfig,
        max_grad_norm: float,
        total_updates: int,
        token_budget: int,
        load: ModelLoader,
        ends: tuple[int, ...],
    ) -> Settings[TrainStrategy]:
        """Return the settings of a model in training.

        Args:
            total_updates: number of optimizer updates in the whole run, which the learning-rate schedule spans.
            token_budget: tokens of a micro-batch.
            ends: tokens that end a turn of the template, for the export's generation_config.
        """
        ...


class ScoreBackend(Protocol):
    """A block `strategy_args` for a reference or a teacher."""

    def score_settings(self, model: RoleModel, wrap: ModelWrapper) -> Settings[TeachStrategy]:
        """Return the settings of a fixed model. `wrap` determines its output."""
        ...


class GenerateBackend(Protocol):
    """A block `strategy_args` for the policy that generates, and for judges."""

    def generate_settings(
        self, model: RoleModel, context: int, adapter_rank: int | None, keeps_kv_cache: bool
    ) -> Settings[GenerateStrategy]:
        """Return the settings of an engine.

        Args:
            context: largest number of tokens of prompt and response together.
            adapter_rank: LoRA rank of the adapters that the engine will load. None if it loads whole models.
            keeps_kv_cache: whether a response that spans a weight update keeps its KV cache.
        """
        ...


class RewardBackend(Protocol):
    """A block `strategy_args` for classifiers whose score is the reward."""

    def reward_settings(self, model: RoleModel, context: int, token_budget: int | None) -> Settings[RewardStrategy]:
        """Return the settings of a classifier. `token_budget` is None if the backend batches requests itself."""
        ...


def choose_algorithms(deterministic: bool) -> None:
    """Switch torch's deterministic algorithms on or off in this process, and rounding to tf32 off.

    By default, torch rounds the inputs of fp32 convolutions on GPUs to tf32, though not those of matrix products: those
    of vision towers, which read a picture's patches, and of gated delta rules.
    """
    import torch

    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.allow_tf32 = False
