"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from roll.types import Metrics


class Stopwatch:
    """Adds up wall-clock seconds by part: `with watch("rollout"): ...`. Parts may nest. For one thread."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - start

    def take(self) -> Metrics:
        """Seconds of each part since the last call, as `time/<part>`."""
        metrics = {f"time/{part}": seconds for part, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics
