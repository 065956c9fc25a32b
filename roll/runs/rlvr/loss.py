"""Builds the loss of reinforcement learning from the configuration."""

from __future__ import annotations

from roll.algorithms.corrections import Correction, MismatchCorrection
from roll.algorithms.divergence import DistilledPolicy
from roll.algorithms.losses import Loss
from roll.algorithms.objectives import OBJECTIVES, Objective
from roll.algorithms.policy_loss import PolicyLoss
from roll.config.derived.corrections import correction_of
from roll.config.derived.ratios import ratio_source, weighs_kl
from roll.config.derived.teachers import teacher_roles
from roll.config.schema.rlvr import RlvrConfig
from roll.registry import imported


def learner_loss(config: RlvrConfig) -> Loss:
    """Return the policy loss, plus the divergence from the teachers if there are any."""
    loss = policy_loss(config)
    return DistilledPolicy(loss, config.distill_loss_coef) if teacher_roles(config) else loss


def policy_loss(config: RlvrConfig) -> PolicyLoss:
    """Return the policy loss with all configured terms."""
    return PolicyLoss(
        objective=objective(config),
        correction=correction(config),
        on_policy=ratio_source(config) == "on_policy",
        kl_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
        kl_estimator=config.kl_loss_type,
        kl_importance=config.use_kl_loss and weighs_kl(config),
        entropy_coef=config.entropy_loss_coef,
        mask_threshold=config.off_policy_mask_threshold,
    )


def objective(config: RlvrConfig) -> Objective:
    """Return the policy term that `policy_loss` names."""
    method = config.policy_loss
    return OBJECTIVES.find(method.name)(**method.arguments(config), **config.policy_loss_args)


def correction(config: RlvrConfig) -> MismatchCorrection | None:
    """Return the correction that `mismatch_correction` names, with its bounds, or None without a correction."""
    if config.mismatch_correction.is_users:
        return imported(config.mismatch_correction.name)(**config.mismatch_correction_args)
    settings = correction_of(config)
    if settings is None:
        return None
    low, high = settings.low or 0.0, float("inf") if settings.high is None else settings.high
    return Correction(settings.weight, settings.cap, settings.reject, low, high)
