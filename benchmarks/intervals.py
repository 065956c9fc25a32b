"""Confidence intervals of means over a few runs, and of differences of such means. Pure functions.

Runs with different seeds are the sample. Their figures are taken as normal with unknown variance, so intervals are
Student's, and those of differences are Welch's (1947): the degrees of freedom are those of Satterthwaite. An interval
knows only the variation that the runs contain: runs that start from the same policy say nothing about other starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, exp, lgamma, pi, sqrt, tan
from statistics import fmean, stdev

CONFIDENCE = 0.95
"""Confidence level of every (two-sided) interval."""
INTERVALS = 2000
"""Number of intervals of Simpson's rule. The error of a quantile is then far below a table's last digit."""


@dataclass(frozen=True)
class Sample:
    """Mean, sample standard deviation and number of a figure's values, one value per run. One value has no standard
    deviation.
    """

    mean: float
    sd: float | None
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Sample:
        """Summarise values."""
        return Sample(fmean(values), stdev(values) if len(values) > 1 else None, len(values))

    def __str__(self) -> str:
        """Return the mean with its standard deviation."""
        return f"{self.mean:.1f}" if self.sd is None else f"{self.mean:.1f} ± {self.sd:.1f}"

    @property
    def variance_of_mean(self) -> float:
        """Return the estimated variance of the mean. Requires at least two values."""
        assert self.sd is not None, "one value has no variance"
        return self.sd**2 / self.count


def mean_with_interval(sample: Sample) -> str:
    """Return the mean with its confidence interval in brackets. With one value there is no interval."""
    if sample.sd is None:
        return f"{sample.mean:.1f}, no interval"
    half = quantile(sample.count - 1) * sqrt(sample.variance_of_mean)
    return f"{sample.mean:.1f} [{sample.mean - half:.1f}, {sample.mean + half:.1f}]"


def difference_with_interval(one: Sample, other: Sample) -> str:
    """Return the difference of two means with Welch's confidence interval in brackets. If either has one value, there
    is no interval.
    """
    between = one.mean - other.mean
    if one.sd is None or other.sd is None:
        return f"{between:+.1f}, no interval"
    half = welch(one, other)
    return f"{between:+.1f} [{between - half:+.1f}, {between + half:+.1f}]"


def welch(one: Sample, other: Sample) -> float:
    """Return half the width of Welch's confidence interval of the difference of two means; 0 if no value varies."""
    first, second = one.variance_of_mean, other.variance_of_mean
    if not first + second:
        return 0.0
    freedom = (first + second) ** 2 / (first**2 / (one.count - 1) + second**2 / (other.count - 1))
    return quantile(freedom) * sqrt(first + second)


def quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """Return the t for which P(-t < T < t) is `confidence`, where T has Student's distribution with `freedom` degrees
    of freedom.

    With T = sqrt(freedom) tan(a), the density of a is proportional to cos(a)^(freedom - 1). The quantile of a is found
    by bisection.
    """
    low, high = 0.0, pi / 2
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _probability(middle, freedom) < confidence else (low, middle)
    return sqrt(freedom) * tan(low)


def _probability(angle: float, freedom: float) -> float:
    """Return P(|atan(T / sqrt(freedom))| < angle), by Simpson's rule."""
    scale = 2 * exp(lgamma((freedom + 1) / 2) - lgamma(freedom / 2)) / sqrt(pi)
    step = angle / INTERVALS
    weights = (1 if number in (0, INTERVALS) else 4 if number % 2 else 2 for number in range(INTERVALS + 1))
    return scale * step / 3 * sum(weight * cos(number * step) ** (freedom - 1) for number, weight in enumerate(weights))
