"""How the cost of a computation grows with its input."""

from __future__ import annotations

import time
from collections.abc import Callable

LARGER = 8
"""The larger input to the smaller."""
ABOUT_LINEAR = 24.0
"""Below it, time grows with the size, which would give 8; its square would give 64."""


def growth(work: Callable[[str], object], text: Callable[[int], str], size: int) -> float:
    """The time that `work` takes for `text(8 * size)`, to that for `text(size)`.

    Of this thread's time on the processor, the least of several runs: what else the machine does makes neither smaller.
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
