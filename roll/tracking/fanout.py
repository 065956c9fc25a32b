"""Combines several trackers. A failure of the run's own record ends the training; another's does not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import TracebackType

from roll.tracking.base import Notice, Record, StepNotices, Tracker, Watch
from roll.types import Metrics, RolloutGroup

LOG = logging.getLogger(__name__)
FAILURES = (Exception, SystemExit)
"""Exceptions of tracker libraries that do not end the training. Some libraries raise SystemExit to request a login."""


class Tracking:
    """Passes everything to the record first and then to the other trackers. Says the notices of each step."""

    name = "tracking"

    def __init__(self, record: Record, others: Sequence[Tracker] = (), last_step: int = -1) -> None:
        """
        Args:
            record: the run's own record. Its errors propagate to the caller.
            others: other trackers. One that fails is reported, closed and not used any more.
            last_step: last step that was logged before; -1 if no step was logged.
        """
        self._record = record
        self._others = list(others)
        self._last_step = last_step
        self._step_notices = StepNotices()

    def watch(self, watches: Sequence[Watch]) -> None:
        """Look for the conditions of these watches in the metrics of all following steps."""
        self._step_notices = StepNotices(watches)

    @property
    def step_under_way(self) -> int:
        """Return the first step that is not logged yet."""
        return self._last_step + 1

    def log(self, step: int, metrics: Metrics) -> None:
        self._record.log(step, metrics)
        self._last_step = step
        self._call_others(lambda tracker: tracker.log(step, metrics))
        if found := self._step_notices.after(step, metrics):
            self.notices(found)

    def notices(self, found: Sequence[Notice]) -> None:
        """Record notices, and print them to the terminal and the driver's log."""
        self._record.notices(found)
        for notice in found:
            LOG.warning("%s", notice.line)

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        self._record.samples(step, groups)
        self._call_others(lambda tracker: tracker.samples(step, groups))

    def held_out(self, step: int, name: str, groups: Sequence[RolloutGroup]) -> None:
        """See `Record`. Other trackers do not receive responses of validation."""
        self._record.held_out(step, name, groups)

    def close(self) -> None:
        """Close all trackers, even if some fail. An error of the record is raised at the end."""
        others, self._others = self._others, []
        try:
            for tracker in others:
                _close(tracker)
        finally:
            self._record.close()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call_others(self, tell: Callable[[Tracker], None]) -> None:
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
    """Log a warning of one line, and the traceback at level INFO, for the log file only."""
    LOG.warning("tracker '%s' failed and is not used any more: %s: %s", name, type(error).__name__, error)
    LOG.info("traceback of tracker '%s'", name, exc_info=error)
