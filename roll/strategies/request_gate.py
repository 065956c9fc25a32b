"""Admits requests to an engine, and measures how long the engine worked on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType


class RequestGate(asyncio.Event):
    """Set while the engine may generate. A request waits for that, and is in flight within `with gate:`.

    The engine is busy while it may generate and at least one request is in flight: one that is paused or asleep is idle, whatever it
    has been asked.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Set. `clock` gives seconds."""
        super().__init__()
        super().set()
        self._clock = clock
        self.in_flight = 0
        """Requests."""
        self._busy = 0.0
        self._changed = clock()

    def set(self) -> None:
        """See `asyncio.Event`."""
        self._count()
        super().set()

    def clear(self) -> None:
        """See `asyncio.Event`."""
        self._count()
        super().clear()

    def __enter__(self) -> None:
        self._count()
        self.in_flight += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._count()
        self.in_flight -= 1

    def take_busy_seconds(self) -> float:
        """Return the seconds in which the engine was busy since the last call."""
        self._count()
        busy, self._busy = self._busy, 0.0
        return busy

    def _count(self) -> None:
        """Count the time since the last change, before the next one."""
        now = self._clock()
        if self.in_flight and self.is_set():
            self._busy += now - self._changed
        self._changed = now
