"""Measures the duration of the parts of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from roll.types import Metrics


class Stopwatch:
    """Adds up wall-clock seconds by part: `with watch("rollout"): ...`. For use from one thread.

    The seconds of a nested part are not counted in the part around it.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = 0.0

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start, outer, self._inner = time.perf_counter(), self._inner, 0.0
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._seconds[part] += seconds - self._inner
            self._inner = outer + seconds

    def reset(self) -> Metrics:
        """Return the seconds of each part since the last call, as metrics `time/<part>`, and start again at 0."""
        metrics = {f"time/{part}": seconds for part, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics
