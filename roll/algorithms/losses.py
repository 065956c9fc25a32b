"""Losses of an update as pure tensor functions: the token losses before aggregation, the loss of a critic (the squared
error of its values against the returns), and the load-balancing loss of a mixture of experts, which grows as a router
sends tokens to fewer experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from roll.types import Bools, TrainBatch


def load_balancing(router_logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the loss E * sum_i f_i P_i of one router, and the ratio of the largest expert load to the mean load.

    f_i is the fraction of tokens that choose expert i among their k experts, and P_i is the mean router probability of
    expert i. The loss is k if loads and probabilities are even, and at most E. f has no gradient. Source: Switch
    Transformer, arXiv 2101.03961, eq. 4 to 6, with k experts per token as in transformers' `load_balancing_loss_func`.

    Args:
        router_logits: [T, E], for all tokens of a micro-batch.
        top_k: k, the number of experts per token.

    Returns:
        Two scalars in the precision of the softmax, fp32 or higher. The second has no gradient.
    """
    experts = router_logits.shape[-1]
    precision = torch.promote_types(router_logits.dtype, torch.float32)
    probabilities = router_logits.softmax(-1, dtype=precision)
    chosen = probabilities.detach().topk(top_k, -1).indices
    load = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0).mean(0)
    return experts * (load * probabilities.mean(0)).sum(), load.max() * experts / top_k


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
        """Return a mask [T] of tokens that the loss treats differently, or None. Called with the whole step."""
        return None


@dataclass(frozen=True)
class NegativeLogLikelihood(Loss):
    """Supervised fine-tuning: -log p of each response token."""

    def __call__(self, log_probs: Tensor, entropy: Tensor, inputs: LossInputs) -> TokenLosses:
        return TokenLosses(-log_probs, {"sft/loss": -log_probs.detach(), "sft/entropy": entropy.detach()})


@dataclass(frozen=True)
class ValueLoss(Loss):
    """Value loss: 1/2 max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2), or 1/2 (V - R)^2 without a clip.

    V_old is the value before the step's first update, and R is the return. If the clipped value is further from the
    return, the token has no gradient. Source: OpenAI Baselines, ppo2; Huang et al., "The 37 Implementation Details of
    Proximal Policy Optimization", 2022, detail 9.
    """

    clip: float | None = None
    """c. None: no clipping."""

    metric_prefix: ClassVar[str] = "critic"

    def __call__(self, values: Tensor, inputs: LossInputs) -> TokenLosses:
        """See `Loss`. `values` are the critic's values [S]."""
        old, returns = inputs.values, inputs.returns
        assert old is not None and returns is not None, "the critic's loss needs old values and returns"
        free = (values - returns).square()
        if self.clip is None:
            larger, clipped = free, torch.zeros_like(free)
        else:
            # Equals old + clip(V - old), but without a rounding error if V is within the bounds.
            held = (values.clamp(old - self.clip, old + self.clip) - returns).square()
            larger, clipped = torch.maximum(free, held), (held > free).float()
        losses = 0.5 * larger
        return TokenLosses(losses, {"critic/loss": losses.detach(), "critic/clip_fraction": clipped})
