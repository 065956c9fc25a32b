"""Token losses: what each response token adds to the loss of an update, before aggregation. Pure tensor functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from roll.algorithms.kl import kl_estimate


@dataclass(frozen=True)
class LossInputs:
    """The response tokens of one micro-batch, [S] each. fp32, natural logs."""

    advantages: Tensor
    behaviour_log_probs: Tensor | None
    """Of the engine that sampled the token; None if it was not asked for them."""
    ref_log_probs: Tensor | None
    proximal_log_probs: Tensor | None = None
    """Of the trainer's policy before the step's first update; None if that pass was not run."""


@dataclass(frozen=True)
class TokenLosses:
    """What a loss says of each response token."""

    losses: Tensor
    """[S], with a gradient."""
    metrics: Mapping[str, Tensor]
    """[S] each, without one; reported as means over the response tokens of a step."""


class Loss(Protocol):
    """A loss over response tokens. Implementations are frozen and picklable: they travel to the workers."""

    def __call__(self, log_probs: Tensor, entropy: Tensor, inputs: LossInputs) -> TokenLosses:
        """Losses of the S response tokens from their log-probs [S] and entropies [S] under the current policy."""
        ...


@dataclass(frozen=True)
class PolicyLoss:
    """PPO's clipped objective with optional KL and entropy terms.

    loss = max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(log_probs - old). Old is the trainer's policy before the
    step's first update where its log-probs are given, otherwise the behaviour policy.
    Sources: PPO, arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476, eq. 10; dual clip, which bounds
    the loss of tokens with A < 0 at -A dual_clip: arXiv 1912.09729, eq. 5.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0

    def __call__(self, log_probs: Tensor, entropy: Tensor, inputs: LossInputs) -> TokenLosses:
        """See `Loss`."""
        advantages = inputs.advantages
        old = inputs.behaviour_log_probs if inputs.proximal_log_probs is None else inputs.proximal_log_probs
        assert old is not None, "a ratio without log-probs to take it against"
        log_ratio = log_probs - old
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        losses = torch.maximum(-advantages * ratio, -advantages * clipped)
        if self.dual_clip is not None:
            losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * self.dual_clip), losses)
        metrics = {
            "policy/loss": losses.detach(),
            "policy/ratio": ratio.detach(),
            "policy/clip_fraction": (-advantages * clipped > -advantages * ratio).float(),
            "policy/kl_behaviour": kl_estimate(log_probs, old, "k3").detach(),
            "policy/entropy": entropy.detach(),
        }
        if inputs.ref_log_probs is not None:
            kl = kl_estimate(log_probs, inputs.ref_log_probs, self.kl_estimator)
            metrics["policy/kl_ref"] = kl.detach()
            if self.kl_coef:
                losses = losses + self.kl_coef * kl
        if self.entropy_coef:
            losses = losses - self.entropy_coef * entropy
        return TokenLosses(losses, metrics)


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """Supervised fine-tuning: -log p of each token of the response."""

    def __call__(self, log_probs: Tensor, entropy: Tensor, inputs: LossInputs) -> TokenLosses:
        """See `Loss`."""
        return TokenLosses(-log_probs, {"sft/loss": -log_probs.detach(), "sft/entropy": entropy.detach()})
