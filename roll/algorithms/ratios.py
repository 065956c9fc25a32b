"""Ratios of probabilities, bounded so that they stay finite."""

from __future__ import annotations

from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Largest log-ratio; ratios are at most e^20, 5e8, as in verl. In fp32 e^89 is infinite, and 0 times that is NaN, also in a gradient."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), at most e^20, without a gradient above it."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def is_clamped(log_ratio: Tensor) -> Tensor:
    """Mark where `ratio_of` clamps."""
    return log_ratio.detach() > LARGEST_LOG_RATIO
