"""Confidence intervals of an evaluation's estimates. Pure functions.

The prompts are the sample; the responses to one prompt are a cluster. So every estimate is a mean over prompts, and its standard error is
taken over prompts: sqrt(sum (x_i - mean)^2) / N, the clustered one of Miller, arXiv 2411.00640, section 2.2, of clusters of one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist, fmean

CONFIDENCE = 0.95
"""Confidence level of every interval, two-sided."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and its interval."""

    value: float
    low: float
    high: float


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of one value for each prompt."""
    mean = fmean(values)
    return sqrt(sum((value - mean) ** 2 for value in values)) / len(values)


def share(values: Sequence[float], samples: int) -> Estimate:
    """Return the mean of shares, and the Wilson score interval of the effective sample size.

    That is p (1 - p) / SE^2: with one response to each prompt the number of prompts N, which makes it Wilson's own interval
    (Wilson, 1927). It is never below N, as a share varies no more than a single response, and is bounded by the number of responses.
    Where all responses are right, or none, it is N. Source: Dean and Pagano, 2015, "Evaluating confidence interval methods for binomial
    proportions in clustered surveys".

    Args:
        values: for each prompt a share of its responses, or a probability, in [0, 1].
        samples: responses to each prompt.
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
    """Return the score interval of a share in a sample of this size."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    middle = mean + z * z / (2 * size)
    width = z * sqrt(mean * (1 - mean) / size + z * z / (4 * size * size))
    low, high = ((middle + side) / (1 + z * z / size) for side in (-width, width))
    return low if mean > 0.0 else 0.0, high if mean < 1.0 else 1.0


def average(values: Sequence[float]) -> Estimate:
    """Return the mean of one number for each prompt, of any range, and the interval of the normal distribution."""
    mean = fmean(values)
    width = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * standard_error(values)
    return Estimate(mean, mean - width, mean + width)
