"""The loss of reinforcement learning: a corrected policy term, plus KL and entropy terms."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from roll.algorithms.corrections import MismatchCorrection
from roll.algorithms.kl import EXPONENTIAL, importance_weighted, token_kl
from roll.algorithms.losses import Loss, LossInputs, TokenLosses
from roll.algorithms.objectives import Objective, PolicyTokens, Ppo
from roll.algorithms.ratios import is_clamped, sequence_mean
from roll.types import Bools, TrainBatch


@dataclass(frozen=True)
class PolicyLoss(Loss):
    """loss = weight * objective + kl_coef * KL(policy || reference) - entropy_coef * entropy.

    With `on_policy`, the old policy in the objective's ratios is the current policy. Without it, the old policy is the
    trainer's policy before the step's first update, or the behaviour policy if the log-probs of the former are not
    given. The weight comes from the correction, and is 1 without one; see `Correction`. `kl_importance` and
    `mask_threshold` compare the policy with the behaviour policy if its log-probs are given, otherwise with the old
    policy. With `mask_threshold`, the objective's term is 0 at the tokens that `is_far_and_bad` marks.
    """

    objective: Objective = field(default_factory=Ppo)
    correction: MismatchCorrection | None = None
    on_policy: bool = False
    """Whether to use the current policy as the old one, because a step makes only one update. Ratios are then exactly
    1.
    """
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_importance: bool = False
    """Whether to weight the KL of each token by the ratio of the policy to the policy that sampled the token."""
    entropy_coef: float = 0.0
    mask_threshold: float | None = None
    """Threshold of `is_far_and_bad`, in nats per token. None: no token is masked."""

    def token_selection(self, batch: TrainBatch) -> Bools | None:
        """See `Loss`."""
        return self.objective.token_selection(batch)

    def __call__(self, log_probs: Tensor, entropy: Tensor, inputs: LossInputs) -> TokenLosses:
        """See `Loss`."""
        old = self._old(log_probs, inputs)
        surrogate = self.objective(
            PolicyTokens(log_probs, old, inputs.advantages, inputs.lengths, inputs.token_selection)
        )
        losses = surrogate.losses
        metrics = {
            "policy/loss": losses.detach(),
            "policy/ratio": surrogate.ratio,
            "policy/clip_fraction": surrogate.clipped.float(),
            "policy/kl_behaviour": token_kl(
                old, log_probs, "k3"
            ).detach(),  # KL(old || policy); k3 is unbiased over samples of `old`
            "policy/entropy": entropy.detach(),
        }
        clamped = is_clamped(log_probs - old)
        if self.correction is not None:
            assert inputs.behaviour_log_probs is not None, "a correction needs the engine's log-probs"
            corrected = self.correction(old - inputs.behaviour_log_probs, inputs.lengths)
            losses = losses * corrected.weights
            metrics |= corrected.metrics
        sampled = old if inputs.behaviour_log_probs is None else inputs.behaviour_log_probs
        if self.mask_threshold is not None:
            masked = is_far_and_bad(log_probs - sampled, inputs.advantages, inputs.lengths, self.mask_threshold)
            losses = torch.where(masked, 0.0, losses)
            metrics["policy/off_policy_masked_fraction"] = masked.float()
        if inputs.ref_log_probs is not None:
            kl = token_kl(log_probs, inputs.ref_log_probs, self.kl_estimator)
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
        assert old is not None, "ratios need the log-probs of an old policy"
        return old


def is_far_and_bad(log_ratio: Tensor, advantages: Tensor, lengths: Tensor, threshold: float) -> Tensor:
    """Return a mask, bool [S], of the tokens with A < 0 in sequences in which the mean of log(mu / pi) is above
    `threshold`.

    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556, section 3.1.

    Args:
        log_ratio: [S], log(pi / mu), where mu is the policy that sampled.
        advantages: [S], A.
        lengths: int64 [N], number of response tokens of each sequence.
        threshold: In nats per token.
    """
    return (advantages < 0) & (sequence_mean(-log_ratio.detach(), lengths) > threshold)
