"""Rewrites the report while a run goes on, in a thread, so that an opened page can follow the run."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from roll.tracking.report.write import write_report
from roll.types import Metrics, RolloutGroup

LOG = logging.getLogger(__name__)
EVERY = 60.0
"""Shortest time between the starts of two writes, in seconds."""
TIMES = 50.0
"""That time is also at least this multiple of the duration of the last write, which so takes at most 2% of a core."""


class LiveReport:
    """A tracker that writes the report after the first step that it is told of, and then after a step when it is due.

    The last report of a run is written by `RunEnding`.
    """

    name = "report"

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._every, self._due = EVERY, clock()
        self._thread: threading.Thread | None = None

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`. Returns at once."""
        if self._clock() >= self._due and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._write, name="report", daemon=True)
            self._thread.start()

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """See `Tracker`. The report reads them from the run's own record."""

    def close(self) -> None:
        """Wait for a write in progress."""
        if self._thread is not None:
            self._thread.join()

    def _write(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signal handlers belong to the main thread
        begun = self._clock()
        try:
            write_report(self._folder, self._every)
        except Exception as error:  # the end of the run tries again, and says it
            LOG.info("the report could not be written during the run: %s", error, exc_info=error)
        self._every = max(EVERY, TIMES * (self._clock() - begun))
        self._due = begun + self._every
