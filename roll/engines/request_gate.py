"""Controls when requests may run on an engine, and measures how long the engine is busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType


class RequestGate(asyncio.Event):
    """An event that is set while the engine may generate. A request waits for the event, and is in flight inside `with
    gate:`.

    The engine is busy while the event is set and at least one request is in flight. A paused or offloaded engine is
    idle, even with requests in flight.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Create the gate with the event set. `clock` returns the time in seconds."""
        super().__init__()
        super().set()
        self._clock = clock
        self.in_flight = 0
        """Number of requests in flight."""
        self._busy = 0.0
        self._changed = clock()

    def set(self) -> None:
        self._count()
        super().set()

    def clear(self) -> None:
        self._count()
        super().clear()

    def __enter__(self) -> None:
        self._count()
        self.in_flight += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._count()
        self.in_flight -= 1

    def reset_busy_seconds(self) -> float:
        """Return the number of seconds that the engine was busy since the last call."""
        self._count()
        busy, self._busy = self._busy, 0.0
        return busy

    def _count(self) -> None:
        """Add the time since the last change of state to the busy time if it was busy. Call before each change."""
        now = self._clock()
        if self.in_flight and self.is_set():
            self._busy += now - self._changed
        self._changed = now
