"""Estimators of the KL divergence from samples. Source: J. Schulman, "Approximating KL Divergence", 2020."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) at each sampled token, in nats, from the two log-probs of that token.

    With d = ref - policy: k1 = -d (unbiased, high variance), k2 = d^2 / 2 (biased, low variance),
    k3 = exp(d) - 1 - d (unbiased, never negative).

    Args:
        log_probs, ref_log_probs: [S], natural log.
        estimator: k1, k2 or k3.
    """
    d = ref_log_probs - log_probs
    match estimator:
        case "k1":
            return -d
        case "k2":
            return d.square() / 2
        case "k3":
            return torch.expm1(d) - d
    raise ValueError(f"no KL estimator is named '{estimator}'; known: k1, k2, k3")
