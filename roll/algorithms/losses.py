"""Token losses of an update, before aggregation. Pure tensor functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from roll.types import Bools, TrainBatch


@dataclass(frozen=True)
class LossInputs:
    """The response tokens of one micro-batch: S tokens of N whole sequences, concatenated. fp32, natural logs."""

    advantages: Tensor
    """[S]"""
    lengths: Tensor
    """int64 [N], number of response tokens of each sequence. They sum to S."""
    behaviour_log_probs: Tensor | None = None
    """[S], log-probs of the sampling engine. None if not requested."""
    proximal_log_probs: Tensor | None = None
    """[S], log-probs of the trainer's policy before the step's first update. None if they were not computed."""
    ref_log_probs: Tensor | None = None
    """[S], log-probs of the reference policy. None if the loss does not use them."""
    token_selection: Tensor | None = None
    """bool [S], tokens selected by `Loss.token_selection`. None without a selection."""
    values: Tensor | None = None
    """[S], the critic's values before the step's first update. None without a critic."""
    returns: Tensor | None = None
    """[S], the critic's targets. None without a critic."""
    labels: Tensor | None = None
    """[N], label of each sequence (`TrainBatch.labels`). None without labels."""


Counted = tuple[Tensor, Tensor]
"""Values of sequences or pairs, and booleans that mark the values to average. The mean is reported."""


@dataclass(frozen=True)
class TokenLosses:
    """A loss's result for each response token."""

    losses: Tensor
    """[S], with a gradient."""
    metrics: Mapping[str, Tensor]
    """Token metrics by name, [S] each, without a gradient. Reported as means over the response tokens of a step."""
    counted: Mapping[str, Counted] = field(default_factory=dict)
    """Metrics of sequences or pairs by name, without a gradient."""


class Loss(Protocol):
    """A loss over response tokens. Implementations are frozen and picklable, because they are sent to the workers."""

    metric_prefix: ClassVar[str] = "policy"
    """Prefix of the model's own metrics, such as its learning rate."""

    __call__: Callable[..., TokenLosses]
    """Return the losses of the S response tokens, given the model's outputs, [S] each, and `LossInputs`.

    A policy returns log-probs and entropies; a critic returns values.
    """

    def token_selection(self, batch: TrainBatch) -> Bools | None:
        """Return a mask [T] of the tokens that the loss treats differently, or None. Called with the whole step, before
        it is split.
        """
        return None


@dataclass(frozen=True)
class NegativeLogLikelihood(Loss):
    """Supervised fine-tuning: -log p of each response token."""

    def __call__(self, log_probs: Tensor, entropy: Tensor, inputs: LossInputs) -> TokenLosses:
        """See `Loss`."""
        return TokenLosses(-log_probs, {"sft/loss": -log_probs.detach(), "sft/entropy": entropy.detach()})
