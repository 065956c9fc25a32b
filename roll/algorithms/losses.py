"""Token losses: what each response token adds to the loss of an update, before aggregation. Pure tensor functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from roll.types import Bools, TrainBatch


@dataclass(frozen=True)
class LossInputs:
    """The response tokens of one micro-batch: S tokens of N whole sequences laid end to end. fp32, natural logs."""

    advantages: Tensor
    """[S]"""
    lengths: Tensor
    """int64 [N], response tokens of each sequence; they sum to S."""
    behaviour_log_probs: Tensor | None = None
    """[S], of the engine that sampled the token; None if it was not asked for them."""
    proximal_log_probs: Tensor | None = None
    """[S], of the trainer's policy before the step's first update; None if that pass was not run."""
    ref_log_probs: Tensor | None = None
    """[S], of the reference policy; None if no term uses it."""
    token_selection: Tensor | None = None
    """bool [S], tokens that `Loss.token_selection` chose; None if it chose none."""
    values: Tensor | None = None
    """[S], the critic's before the step's first update; None without a critic."""
    returns: Tensor | None = None
    """[S], what the critic learns; None without a critic."""
    labels: Tensor | None = None
    """[N], what is known of each sequence (`TrainBatch.labels`); None if nothing is."""


Counted = tuple[Tensor, Tensor]
"""Values of sequences or pairs, and as booleans which of them count; reported as their mean."""


@dataclass(frozen=True)
class TokenLosses:
    """What a loss says of each response token."""

    losses: Tensor
    """[S], with a gradient."""
    metrics: Mapping[str, Tensor]
    """[S] each, without one; reported as means over the response tokens of a step."""
    counted: Mapping[str, Counted] = field(default_factory=dict)
    """Metrics of sequences or pairs, without a gradient."""


class Loss(Protocol):
    """A loss over response tokens. Implementations are frozen and picklable: they travel to the workers."""

    metric_prefix: ClassVar[str] = "policy"
    """What learns: the first part of its metrics' names."""

    __call__: Callable[..., TokenLosses]
    """Losses of the S response tokens from what the model puts out of them, [S] each, and `LossInputs`.

    A policy puts out log-probs and entropies, a critic values.
    """

    def token_selection(self, batch: TrainBatch) -> Bools | None:
        """[T], tokens that the loss treats apart. Chosen over a whole step, before it is split; None for none."""
        return None


@dataclass(frozen=True)
class NegativeLogLikelihood(Loss):
    """Supervised fine-tuning: -log p of each token of the response."""

    def __call__(self, log_probs: Tensor, entropy: Tensor, inputs: LossInputs) -> TokenLosses:
        """See `Loss`."""
        return TokenLosses(-log_probs, {"sft/loss": -log_probs.detach(), "sft/entropy": entropy.detach()})
