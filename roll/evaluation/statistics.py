"""Confidence intervals of an evaluation's estimates. Pure functions.

The prompts are the sample, and the responses to one prompt are a cluster. So every estimate is a mean over prompts, with the standard
error sqrt(sum (x_i - mean)^2) / N. This is the clustered standard error of Miller, arXiv 2411.00640, section 2.2, for clusters of equal
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist, fmean

CONFIDENCE = 0.95
"""Confidence level of every (two-sided) interval."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and its confidence interval from `low` to `high`."""

    value: float
    low: float
    high: float


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean. `values` has one value for each prompt."""
    mean = fmean(values)
    return sqrt(sum((value - mean) ** 2 for value in values)) / len(values)


def share(values: Sequence[float], samples: int) -> Estimate:
    """Return the mean of shares, with the Wilson score interval for the effective sample size.

    The effective sample size is p (1 - p) / SE^2, where p is the mean and SE its standard error. With one response to each prompt it equals
    the number of prompts N, and the interval is the ordinary Wilson interval (Wilson, 1927). It is never below N, because a share varies no
    more than a single response, and never above the number of responses. If all responses are right, or all are wrong, it is N.
    Source: Dean and Pagano, 2015, "Evaluating confidence interval methods for binomial proportions in clustered surveys".

    Args:
        values: one value in [0, 1] for each prompt: a share of its responses, or a probability.
        samples: number of responses to each prompt.
    """
    mean, error, prompts = fmean(values), standard_error(values), len(values)
    variance = mean * (1.0 - mean)
    if variance <= 0.0:
        size = float(prompts)
    else:
        most = float(prompts * samples)
        size = min(most, max(float(prompts), variance / error**2)) if error > 0.0 else most
    low, high = wilson(mean, size)
    return Estimate(mean, low, high)


def wilson(mean: float, size: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the Wilson score interval (low, high) of the share `mean` in a sample of `size` observations."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    middle = mean + z * z / (2 * size)
    width = z * sqrt(mean * (1 - mean) / size + z * z / (4 * size * size))
    low, high = ((middle + side) / (1 + z * z / size) for side in (-width, width))
    return low if mean > 0.0 else 0.0, high if mean < 1.0 else 1.0


def average(values: Sequence[float]) -> Estimate:
    """Return the mean of values in any range, one for each prompt, with the interval from the normal approximation."""
    mean = fmean(values)
    width = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * standard_error(values)
    return Estimate(mean, mean - width, mean + width)
