"""Ratios of probabilities, bounded so that they stay finite."""

from __future__ import annotations

from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Above it a ratio is taken for e^20, 5e8, as in verl: in fp32 e^89 is infinite, and 0 times that is not a number, also in a gradient."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), at most e^20, with no gradient above it."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def is_clamped(log_ratio: Tensor) -> Tensor:
    """Where `ratio_of` is not the ratio."""
    return log_ratio.detach() > LARGEST_LOG_RATIO
