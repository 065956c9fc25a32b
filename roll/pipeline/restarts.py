"""Decides whether lost processes are restarted, or the run ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from roll.errors import WorkerAbandoned, WorkerDied, WorkerFailed, WorkerLate
from roll.pipeline.roles import is_trainer_side

BACK_OFF_SECONDS = (5.0, 30.0, 120.0)
"""Seconds before the first, the second and every further restart within `RECENT_SECONDS`, because a fault may last for a while."""
RECENT_SECONDS = 3600.0


class Restarts:
    """Counts the restarts of a run's trainer side."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._most, self._clock = most, clock
        self._recent: deque[float] = deque()
        self._failed_step: int | None = None
        self.count = 0

    def wait_after(self, failure: WorkerFailed, step: int | None) -> float:
        """Count a restart after a failure in this step. Return the seconds to wait before it.

        The step is None during a restart: then any role may have lost a process that is about to be started again.

        Raises:
            WorkerFailed: the failure, if a restart would not help: a process raised an exception (bad input, memory or disk that ran out),
                the role is not trained, the step failed before, or there were `most` restarts.
        """
        is_loss = isinstance(failure, WorkerDied | WorkerLate | WorkerAbandoned) and (step is None or is_trainer_side(failure.role))
        if not is_loss or not self._most:
            raise failure
        if step is not None and step == self._failed_step:
            raise ended(failure, f"step {step} failed before in the same way, and was taken again")
        if self.count >= self._most:
            raise ended(failure, f"the roles were restarted {self.count} times before, and max_restarts is {self._most}")
        self.count += 1
        if step is not None:
            self._failed_step = step
        now = self._clock()
        while self._recent and self._recent[0] <= now - RECENT_SECONDS:
            self._recent.popleft()
        self._recent.append(now)
        return BACK_OFF_SECONDS[min(len(self._recent), len(BACK_OFF_SECONDS)) - 1]


def ended(failure: WorkerFailed, why: str) -> WorkerFailed:
    """Return the failure with the reason why it ends the run."""
    return type(failure)(failure.role, failure.rank, f"{failure.cause}; {why}", failure.traceback)
