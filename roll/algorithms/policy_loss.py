"""The loss of reinforcement learning: a policy term, corrected and with KL and entropy terms added."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from roll.algorithms.corrections import MismatchCorrection
from roll.algorithms.kl import EXPONENTIAL, importance_weighted, kl_estimate
from roll.algorithms.losses import Loss, LossInputs, TokenLosses
from roll.algorithms.objectives import Objective, PolicyTokens, Ppo
from roll.algorithms.ratios import is_clamped
from roll.types import Bools, TrainBatch


@dataclass(frozen=True)
class PolicyLoss(Loss):
    """loss = weight * objective + kl_coef * KL(policy || reference) - entropy_coef * entropy.

    Ratios are taken against the trainer's policy before the step's first update where its log-probs are given, otherwise
    against the behaviour policy. The weight is the correction's, 1 without one; see `Correction`. With `kl_importance` the KL is weighted
    by the ratio to the behaviour policy where its log-probs are given, otherwise to the one that ratios are taken against.
    """

    objective: Objective = field(default_factory=Ppo)
    correction: MismatchCorrection | None = None
    on_policy: bool = False
    """A step makes one update, so ratios are taken against the current policy and are 1 exactly, without a pass for it."""
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_importance: bool = False
    """The KL of a token counts by the ratio of the policy to the one that sampled it."""
    entropy_coef: float = 0.0

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
        if inputs.ref_log_probs is not None:
            kl = kl_estimate(log_probs, inputs.ref_log_probs, self.kl_estimator)
            metrics["policy/kl_ref"] = kl.detach()
            if self.kl_estimator in EXPONENTIAL:
                clamped = clamped | is_clamped(inputs.ref_log_probs - log_probs)
            if self.kl_coef and self.kl_importance:
                sampled = old if inputs.behaviour_log_probs is None else inputs.behaviour_log_probs
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
