"""Measure how the cost of a computation grows with the size of its input."""

from __future__ import annotations

import time
from collections.abc import Callable

LARGER = 8
"""Ratio of the size of the larger input to that of the smaller input."""
ABOUT_LINEAR = 24.0
"""Upper limit of `growth` for work that takes linear time. Linear time gives about 8, quadratic time about 64."""


def growth(work: Callable[[str], object], text: Callable[[int], str], size: int) -> float:
    """Return the time of `work(text(8 * size))` divided by the time of `work(text(size))`.

    Each time is the minimum CPU time of this thread over several runs, so that other load on the machine hardly
    matters.
    """
    small, large = (_seconds(work, text(number)) for number in (size, LARGER * size))
    return large / small


def _seconds(work: Callable[[str], object], text: str) -> float:
    taken = []
    for _ in range(5):
        begin = time.thread_time()
        work(text)
        taken.append(time.thread_time() - begin)
    return min(taken)
