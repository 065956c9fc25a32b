"""Token losses of an update, before aggregation. Pure tensor functions."""

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
    """int64 [N], number of response tokens of each sequence, with the sum S."""
    behaviour_log_probs: Tensor | None = None
    """[S], log-probs of the engine that sampled the token. None if not requested."""
    proximal_log_probs: Tensor | None = None
    """[S], log-probs of the trainer's policy before the step's first update. None if that pass was not run."""
    ref_log_probs: Tensor | None = None
    """[S], log-probs of the reference policy. None if no term uses them."""
    token_selection: Tensor | None = None
    """bool [S], tokens that `Loss.token_selection` selected. None without a selection."""
    values: Tensor | None = None
    """[S], the critic's values before the step's first update. None without a critic."""
    returns: Tensor | None = None
    """[S], the critic's targets. None without a critic."""
    labels: Tensor | None = None
    """[N], label of each sequence (`TrainBatch.labels`). None without labels."""


Counted = tuple[Tensor, Tensor]
"""Values of sequences or pairs, and booleans that mark those that count. Reported as their mean."""


@dataclass(frozen=True)
class TokenLosses:
    """A loss's result for each response token."""

    losses: Tensor
    """[S], with a gradient."""
    metrics: Mapping[str, Tensor]
    """[S] each, without a gradient; reported as means over the response tokens of a step."""
    counted: Mapping[str, Counted] = field(default_factory=dict)
    """Metrics of sequences or pairs, without a gradient."""


class Loss(Protocol):
    """A loss over response tokens. Implementations are frozen and picklable, because they are sent to the workers."""

    metric_prefix: ClassVar[str] = "policy"
    """Name of the trained model, which prefixes its metrics."""

    __call__: Callable[..., TokenLosses]
    """Return the losses of the S response tokens from the model's outputs, [S] each, and `LossInputs`.

    A policy puts out log-probs and entropies, a critic values.
    """

    def token_selection(self, batch: TrainBatch) -> Bools | None:
        """Select [T] tokens that the loss treats differently, over a whole step before it is split. None without a selection."""
        return None


@dataclass(frozen=True)
class NegativeLogLikelihood(Loss):
    """Supervised fine-tuning: -log p of each token of the response."""

    def __call__(self, log_probs: Tensor, entropy: Tensor, inputs: LossInputs) -> TokenLosses:
        """See `Loss`."""
        return TokenLosses(-log_probs, {"sft/loss": -log_probs.detach(), "sft/entropy": entropy.detach()})
