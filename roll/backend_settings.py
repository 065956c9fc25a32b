"""What the settings of all strategies have in common. Each backend has its own settings beside its strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from roll.config.schema.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.backend import Rank
    from roll.models.load import PackedModel

S = TypeVar("S", covariant=True)
ModelLoader: TypeAlias = "Callable[[str, ModelConfig, int], PackedModel]"
"""Function that loads the trained model from its path, its `model_args` and a seed. The model's outputs are passed to
the loss.
"""
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
