"""Reduces a long series to few points: the range of values, drawn faintly, and the smoothed curve. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BUCKETS = 150
"""Number of buckets into which a long series is divided. Each is about two pixels of a chart wide."""
SMOOTHED_POINTS = 200
"""Largest number of points of a smoothed curve."""
SMOOTHED_FROM = 40
"""Smallest number of points for which a series is smoothed."""
SHARE = 25
"""The smoothing window extends 1/SHARE of the series to each side of a point."""


def extremes(values: Sequence[float], buckets: int = BUCKETS) -> list[int]:
    """Return the indices of at most 2 * buckets + 2 points that show the range of a series, in order.

    They are the first and the last point, and the minimum and the maximum of each bucket of consecutive points. A
    series of at most that many points is not reduced.
    """
    if len(values) <= 2 * buckets + 2:
        return list(range(len(values)))
    edges = np.linspace(0, len(values), buckets + 1).astype(int)
    series = np.asarray(values, dtype=float)
    found = {0, len(values) - 1}
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        bucket = series[start:end]
        found |= {int(start + bucket.argmin()), int(start + bucket.argmax())}
    return sorted(found)


def spread_indices(count: int, most: int) -> list[int]:
    """Return the indices of at most `most` of `count` points, evenly spread and in order, including the first and the
    last.
    """
    if count <= most:
        return list(range(count))
    return sorted({int(index) for index in np.linspace(0, count - 1, most).round()})


def smoothed(values: Sequence[float], at: Sequence[int], half: int) -> list[float]:
    """Return, for each index in `at`, the mean of the values at most `half` places away. Windows are shorter at the
    ends.
    """
    series = np.asarray(values, dtype=float)
    return [float(series[max(0, index - half) : index + half + 1].mean()) for index in at]


def half_width(count: int) -> int:
    """Return the half width of the smoothing window for a series of `count` points; 0 if the series is too short to
    smooth.
    """
    return count // SHARE if count >= SMOOTHED_FROM else 0


def short(value: float) -> float:
    """Round to six significant digits, more than a screen shows."""
    return float(f"{value:.6g}")


def bucket_means(
    steps: Sequence[int], values: Sequence[float], most: int
) -> tuple[list[float], list[int], list[float]]:
    """Return at most `most` bars for a series: their centres and widths in steps, and the mean value of each."""
    if len(values) <= most:
        return [float(step) for step in steps], [1] * len(steps), list(values)
    edges = np.linspace(0, len(values), most + 1).astype(int).tolist()
    pairs = list(zip(edges[:-1], edges[1:], strict=True))
    series = np.asarray(values, dtype=float)
    centres = [(steps[start] + steps[end - 1]) / 2 for start, end in pairs]
    widths = [steps[end - 1] - steps[start] + 1 for start, end in pairs]
    return centres, widths, [float(series[start:end].mean()) for start, end in pairs]
