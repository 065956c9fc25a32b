"""From the configuration to the loss of reinforcement learning."""

from __future__ import annotations

from roll.algorithms.corrections import Correction
from roll.algorithms.objectives import Cispo, ClipCov, Gmpo, Gspo, KlCov, Objective, PolicyGradient, Ppo, Topr
from roll.algorithms.policy_loss import PolicyLoss
from roll.config.derived.corrections import correction_of
from roll.config.derived.ratios import ratio_source
from roll.config.schema.rlvr import RlvrConfig


def policy_loss(config: RlvrConfig) -> PolicyLoss:
    """The loss that the keys describe."""
    return PolicyLoss(
        objective=objective(config),
        correction=correction(config),
        on_policy=ratio_source(config) == "on_policy",
        kl_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
        kl_estimator=config.kl_loss_type,
        entropy_coef=config.entropy_loss_coef,
    )


def objective(config: RlvrConfig) -> Objective:
    """The policy term that `policy_loss` names."""
    low, high = config.pg_clip_low or config.pg_clip, config.pg_clip_high or config.pg_clip
    match config.policy_loss:
        case "ppo":
            return Ppo(low, high, 3.0 if config.dual_clip_loss is True else config.dual_clip_loss or None)
        case "pg":
            return PolicyGradient()
        case "gspo":
            return Gspo(low, high)
        case "gmpo":
            return Gmpo(low, high)
        case "cispo":
            return Cispo(low, high)
        case "topr":
            return Topr(config.topr_positive_weight, config.topr_negative_weight)
        case "clip_cov":
            return ClipCov(low, high, config.clip_cov_ratio, config.clip_cov_low, config.clip_cov_high)
        case "kl_cov":
            return KlCov(config.kl_cov_ratio, config.kl_cov_coef)


def correction(config: RlvrConfig) -> Correction | None:
    """The correction that `mismatch_correction` names, with the bounds that the keys give."""
    preset = correction_of(config)
    if preset is None:
        return None
    low, high = preset.low or 0.0, float("inf") if preset.high is None else preset.high
    return Correction(preset.weight, preset.cap, preset.reject, low, high)
