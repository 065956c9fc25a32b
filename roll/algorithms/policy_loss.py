"""The loss of reinforcement learning: a corrected policy term, plus KL and entropy terms."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from roll.algorithms.corrections import MismatchCorrection
from roll.algorithms.kl import EXPONENTIAL, importance_weighted, kl_estimate
from roll.algorithms.losses import Loss, LossInputs, TokenLosses
from roll.algorithms.objectives import Objective, PolicyTokens, Ppo
from roll.algorithms.ratios import is_clamped
from roll.algorithms.segments import sequence_mean
from roll.types import Bools, TrainBatch


@dataclass(frozen=True)
class PolicyLoss(Loss):
    """loss = weight * objective + kl_coef * KL(policy || reference) - entropy_coef * entropy.

    Ratios are taken against the trainer's policy before the step's first update where its log-probs are given, otherwise
    against the behaviour policy. The weight is the correction's, 1 without one; see `Correction`. With `kl_importance` the KL is weighted
    by the ratio to the behaviour policy where its log-probs are given, otherwise to the one that ratios are taken against. With
    `mask_threshold` the objective has no term at tokens of `is_far_and_bad`, which is judged by the same policy.
    """

    objective: Objective = field(default_factory=Ppo)
    correction: MismatchCorrection | None = None
    on_policy: bool = False
    """Whether a step makes only one update. Ratios are then exactly 1, and need no pass for old log-probs."""
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_importance: bool = False
    """Whether to weight a token's KL by the ratio of the policy to the one that sampled the token."""
    entropy_coef: float = 0.0
    mask_threshold: float | None = None
    """Threshold in nats a token. None masks nothing."""

    def token_selection(self, batch: TrainBatch) -> Bools | None:
        """See `Loss`."""
        return self.objective.token_selection(batch)

    def __call__(self, log_probs: Tensor, entropy: Tensor, inputs: LossInputs) -> TokenLosses:
        """See `Loss`."""
        old = self._old(log_probs, inputs)
        said = self.objective(PolicyTokens(log_probs, old, inputs.advantages, inputs.lengths, inputs.token_selection))
        losses = said.losses
        metrics = {
            "policy/loss": losses.detach(),
            "policy/ratio": said.ratio,
            "policy/clip_fraction": said.clipped.float(),
            "policy/kl_behaviour": kl_estimate(old, log_probs, "k3").detach(),  # of the policy that sampled: so k3 is unbiased
            "policy/entropy": entropy.detach(),
        }
        clamped = is_clamped(log_probs - old)
        if self.correction is not None:
            assert inputs.behaviour_log_probs is not None, "a correction without the engine's log-probs"
            corrected = self.correction(old - inputs.behaviour_log_probs, inputs.lengths)
            losses = losses * corrected.weights
            metrics |= corrected.metrics
        sampled = old if inputs.behaviour_log_probs is None else inputs.behaviour_log_probs
        if self.mask_threshold is not None:
            masked = is_far_and_bad(log_probs - sampled, inputs.advantages, inputs.lengths, self.mask_threshold)
            losses = torch.where(masked, 0.0, losses)
            metrics["policy/off_policy_masked_fraction"] = masked.float()
        if inputs.ref_log_probs is not None:
            kl = kl_estimate(log_probs, inputs.ref_log_probs, self.kl_estimator)
            metrics["policy/kl_ref"] = kl.detach()
            if self.kl_estimator in EXPONENTIAL:
                clamped = clamped | is_clamped(inputs.ref_log_probs - log_probs)
            if self.kl_coef and self.kl_importance:
                clamped = clamped | is_clamped(log_probs - sampled)
                kl = importance_weighted(kl, log_probs - sampled, self.kl_estimator)
            if self.kl_coef:
                losses = losses + self.kl_coef * kl
        if self.entropy_coef:
            losses = losses - self.entropy_coef * entropy
        metrics["policy/clamped_fraction"] = clamped.float()
        return TokenLosses(losses, metrics)

    def _old(self, log_probs: Tensor, inputs: LossInputs) -> Tensor:
        if self.on_policy:
            return log_probs.detach()
        old = inputs.behaviour_log_probs if inputs.proximal_log_probs is None else inputs.proximal_log_probs
        assert old is not None, "a ratio without log-probs to take it against"
        return old


def is_far_and_bad(log_ratio: Tensor, advantages: Tensor, lengths: Tensor, threshold: float) -> Tensor:
    """Mark bool [S] tokens with A < 0 of sequences whose mean of log(mu / pi) is above `threshold`, mu being the policy that sampled.

    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556, section 3.1.

    Args:
        log_ratio: [S], log(pi / mu).
        advantages: [S], A.
        lengths: int64 [N], response tokens of each sequence.
    """
    return (advantages < 0) & (sequence_mean(-log_ratio.detach(), lengths) > threshold)
