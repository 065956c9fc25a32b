"""Probability ratios, clamped so that they stay finite."""

from __future__ import annotations

from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Largest log-ratio. Ratios are at most e^20 = 5e8, as in verl. In fp32, e^89 is infinite, and 0 times infinity is NaN.
"""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), clamped to at most e^20. Clamped values have no gradient."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def is_clamped(log_ratio: Tensor) -> Tensor:
    """Mark the log-ratios that `ratio_of` clamps."""
    return log_ratio.detach() > LARGEST_LOG_RATIO
