"""A long series as few points: what is drawn faint behind a curve, and the curve itself. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BUCKETS = 150
"""Buckets of a series with more points than that; each is about two pixels of a chart."""
SMOOTHED_POINTS = 200
SMOOTHED_FROM = 40
"""Points of the shortest series that is smoothed."""
SHARE = 25
"""A mean reaches over the neighbours on both sides, each side this part of the series."""


def extremes(values: Sequence[float], buckets: int = BUCKETS) -> list[int]:
    """Indices of the points that show the range of a series, in order: first, last, and the least and the greatest of each bucket.

    The buckets are runs of neighbours of about equal size. All indices where there are at most 2 * buckets + 2 of them, and never more.
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


def spread(count: int, most: int) -> list[int]:
    """Indices of `most` of `count` points at most, evenly spread, in order, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({int(index) for index in np.linspace(0, count - 1, most).round()})


def smoothed(values: Sequence[float], at: Sequence[int], half: int) -> list[float]:
    """At each index the mean of the values at most `half` places away, fewer at the ends of the series."""
    series = np.asarray(values, dtype=float)
    return [float(series[max(0, index - half) : index + half + 1].mean()) for index in at]


def half_width(count: int) -> int:
    """Half width of the smoothing window of a series of `count` points; 0 if the series is too short."""
    return count // SHARE if count >= SMOOTHED_FROM else 0


def short(value: float) -> float:
    """Six significant digits, which is more than a screen shows."""
    return float(f"{value:.6g}")


def bucket_means(steps: Sequence[int], values: Sequence[float], most: int) -> tuple[list[float], list[int], list[float]]:
    """Bars for a series, at most `most`: their centres and widths on the axis of steps, and the mean of each."""
    if len(values) <= most:
        return [float(step) for step in steps], [1] * len(steps), list(values)
    edges = np.linspace(0, len(values), most + 1).astype(int).tolist()
    pairs = list(zip(edges[:-1], edges[1:], strict=True))
    series = np.asarray(values, dtype=float)
    centres = [(steps[start] + steps[end - 1]) / 2 for start, end in pairs]
    widths = [steps[end - 1] - steps[start] + 1 for start, end in pairs]
    return centres, widths, [float(series[start:end].mean()) for start, end in pairs]
