"""Several trackers as one. Only a failure of the record ends the training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import TracebackType

from roll.tracking.base import Record, Tracker
from roll.types import Metrics, RolloutGroup

LOG = logging.getLogger(__name__)
FAILURES = (Exception, SystemExit)
"""Errors of tracker libraries that do not end the training. Some exit the process to ask for a login."""


class Tracking:
    """Passes everything to the record first and then to the other trackers."""

    name = "tracking"

    def __init__(self, record: Record, others: Sequence[Tracker] = (), last_step: int = -1) -> None:
        """An error of `record` passes to the caller. One of `others` that fails is reported, closed and left out.

        `last_step` was logged before; by default nothing was, not even step 0.
        """
        self._record = record
        self._others = list(others)
        self._last_step = last_step

    @property
    def step_under_way(self) -> int:
        """First step that was not logged."""
        return self._last_step + 1

    def log(self, step: int, metrics: Metrics) -> None:
        self._record.log(step, metrics)
        self._last_step = step
        self._tell_others(lambda tracker: tracker.log(step, metrics))

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        self._record.samples(step, groups)
        self._tell_others(lambda tracker: tracker.samples(step, groups))

    def held_out(self, step: int, name: str, groups: Sequence[RolloutGroup]) -> None:
        """See `Record`; other trackers get no responses of validation."""
        self._record.held_out(step, name, groups)

    def close(self) -> None:
        """Close all trackers in spite of errors. The record's error is raised at the end."""
        others, self._others = self._others, []
        try:
            for tracker in others:
                _close(tracker)
        finally:
            self._record.close()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _tell_others(self, tell: Callable[[Tracker], None]) -> None:
        for tracker in list(self._others):
            try:
                tell(tracker)
            except FAILURES as error:
                self._others.remove(tracker)
                report_failure(tracker.name, error)
                _close(tracker)


def _close(tracker: Tracker) -> None:
    try:
        tracker.close()
    except FAILURES as error:
        report_failure(tracker.name, error)


def report_failure(name: str, error: BaseException) -> None:
    """Log one line as a warning, and the traceback in the log file."""
    LOG.warning("tracker '%s' failed and is left out from here on: %s: %s", name, type(error).__name__, error)
    LOG.info("where tracker '%s' failed", name, exc_info=error)
