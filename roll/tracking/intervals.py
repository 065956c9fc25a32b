"""Confidence intervals of shares. Pure functions."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist

CONFIDENCE = 0.95
"""Confidence level of every (two-sided) interval."""


def wilson(mean: float, size: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the Wilson score interval (low, high) of the share `mean` in a sample of `size` observations."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    middle = mean + z * z / (2 * size)
    width = z * sqrt(mean * (1 - mean) / size + z * z / (4 * size * size))
    low, high = ((middle + side) / (1 + z * z / size) for side in (-width, width))
    return low if mean > 0.0 else 0.0, high if mean < 1.0 else 1.0
