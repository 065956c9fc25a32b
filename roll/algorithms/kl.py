"""Estimators of the KL divergence from samples, and the adaptive controller of the KL coefficient.

Source of the estimators: J. Schulman, "Approximating KL Divergence", 2020.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.methods import LARGEST_ERROR
from roll.algorithms.ratios import LARGEST_LOG_RATIO, ratio_of

EXPONENTIAL = ("k3", "k3+")
"""Estimators that use the exponential of a log-ratio."""
KNOWN = "k1, k2, k3, abs, k1+, k3+"


def token_kl(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token, in nats, from the two log-probs of that token.

    With d = ref - policy: k1 = -d (unbiased, high variance), k2 = d^2 / 2 (biased, low variance),
    k3 = exp(d) - 1 - d (unbiased, never negative; d is clamped to at most 20, without a gradient above), abs = |d|.

    In a loss, only the gradient of an estimator matters. Over samples of the policy, the expected gradient of k1 is
    zero, that of k2 is the gradient of KL(policy || reference), and that of k3 is the gradient of KL(reference ||
    policy). `k1+` and `k3+` have the values of k1 and k3 and the gradient of k2 (straight-through, as in verl's
    `kl_penalty`).

    Args:
        log_probs, ref_log_probs: [S], natural log.
        estimator: k1, k2, k3, abs, k1+ or k3+.

    Raises:
        ValueError: the estimator is unknown.
    """
    d = ref_log_probs - log_probs
    match estimator:
        case "k1":
            return -d
        case "k2":
            return d.square() / 2
        case "k3":
            bounded = d.clamp(max=LARGEST_LOG_RATIO)
            return torch.expm1(bounded) - bounded
        case "abs":
            return d.abs()
        case "k1+" | "k3+":
            value, carrier = token_kl(log_probs, ref_log_probs, estimator[:-1]), d.square() / 2
            return value.detach() + carrier - carrier.detach()
    raise ValueError(f"no KL estimator is named '{estimator}'; known: {KNOWN}")


def importance_weighted(kl: Tensor, log_ratio: Tensor, estimator: str) -> Tensor:
    """Return the KL estimates [S] of tokens sampled by another policy, weighted by the ratio of the policy to the
    sampling policy.

    Over samples of the sampling policy, the expected gradient is exactly the gradient of KL(policy || reference). With
    k1 and k3 the ratio has a gradient, as in DeepSeek-V3.2 (arXiv 2512.02556, section 3.1). k2, `k1+` and `k3+` already
    have the right gradient over the policy's own samples, so for them the ratio is detached.

    Args:
        kl: [S], from `kl_estimate`.
        log_ratio: [S], log-probs under the policy minus log-probs under the sampling policy, with a gradient.
    """
    return kl * ratio_of(log_ratio if estimator in ("k1", "k3") else log_ratio.detach())


def adapted_coefficient(coefficient: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """Return the KL coefficient for the next step. It grows while the KL is above its target, and falls while the KL is
    below it.

    The result is coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon).
    Source: Ziegler et al., arXiv 1909.08593, section 2.2.

    Args:
        kl, target: The KL and its target, in nats per token.
        samples: Number of responses in the step.
        horizon: Number of responses over which a proportional error e changes the coefficient by the factor 1 + e.
    """
    error = min(max(kl / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * (1 + error * samples / horizon)
