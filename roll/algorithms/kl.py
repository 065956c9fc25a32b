"""Estimators of the KL divergence from samples, and the controller of its weight.

Source of the estimators: J. Schulman, "Approximating KL Divergence", 2020.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.methods.adaptive_kl import LARGEST_ERROR
from roll.algorithms.ratios import LARGEST_LOG_RATIO, ratio_of

EXPONENTIAL = ("k3", "k3+")
"""Estimators that use the exponential of a log-ratio."""
KNOWN = "k1, k2, k3, abs, k1+, k3+"


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token, in nats, from the two log-probs of that token.

    With d = ref - policy: k1 = -d (unbiased, high variance), k2 = d^2 / 2 (biased, low variance),
    k3 = exp(d) - 1 - d (unbiased, never negative; d at most 20, as above it is no gradient), abs = |d|.

    As a term of a loss an estimator counts by its gradient, and over samples of the policy the expected gradient of k1 is zero,
    that of k3 belongs to KL(reference || policy), and that of k2 is the gradient of KL(policy || reference).
    `k1+` and `k3+` have the value of k1 and k3 and the gradient of k2 (straight through, as in verl's `kl_penalty`).

    Args:
        log_probs, ref_log_probs: [S], natural log.
        estimator: k1, k2, k3, abs, k1+ or k3+.
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
            value, carrier = kl_estimate(log_probs, ref_log_probs, estimator[:-1]), d.square() / 2
            return value.detach() + carrier - carrier.detach()
    raise ValueError(f"no KL estimator is named '{estimator}'; known: {KNOWN}")


def importance_weighted(kl: Tensor, log_ratio: Tensor, estimator: str) -> Tensor:
    """Estimate the KL [S] at tokens that another policy sampled, weighted by the ratio of the policy to that one.

    Over tokens of the policy that sampled, the expected gradient is that of KL(policy || reference) exactly. With k1 and k3 the ratio
    carries its gradient, as in DeepSeek-V3.2 (arXiv 2512.02556, section 3.1). The gradient of k2, which `k1+` and `k3+` have too, is
    right under the policy's own samples as it is, so there the ratio carries none.

    Args:
        kl: [S], of `kl_estimate`.
        log_ratio: [S], log-probs under the policy less those under the policy that sampled; with a gradient.
    """
    return kl * ratio_of(log_ratio if estimator in ("k1", "k3") else log_ratio.detach())


def adapted_coefficient(coefficient: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """Return the KL's weight for the next step. It grows while the KL is above its target, and falls while it is below.

    coefficient (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon).
    Source: Ziegler et al., arXiv 1909.08593, section 2.2.

    Args:
        kl, target: nats a token.
        samples: responses of the step.
        horizon: responses over which an error e changes the weight by the factor 1 + e.
    """
    error = min(max(kl / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * (1 + error * samples / horizon)
