"""Decides whether a run restarts its trainer's side after the loss of a process, or ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from roll.errors import WorkerAbandoned, WorkerDied, WorkerFailed, WorkerLate
from roll.runs.roles import is_trainer_side

BACK_OFF_SECONDS = (5.0, 30.0, 120.0)
"""Delays in seconds before the first, the second and each later restart within `RECENT_SECONDS`, because a fault may last for a while."""
RECENT_SECONDS = 3600.0


class Restarts:
    """Counts the restarts of a run's trainer side."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`most` is the largest number of restarts. `clock` returns seconds."""
        self._most, self._clock = most, clock
        self._recent: deque[float] = deque()
        self._failed_step: int | None = None
        self.count = 0

    def wait_after(self, failure: WorkerFailed, step: int | None) -> float:
        """Count a restart after a failure in `step`, and return the seconds to wait before it.

        `step` is None if the failure happened while roles were being restarted. Then the lost process may be of any role.

        Raises:
            WorkerFailed: the failure, because a restart would not help. Its process raised an exception (such as bad input or memory that
                ran out), its role is not on the trainer's side, the same step failed before, or there were already `most` restarts.
        """
        is_loss = isinstance(failure, WorkerDied | WorkerLate | WorkerAbandoned) and (step is None or is_trainer_side(failure.role))
        if not is_loss or not self._most:
            raise failure
        if step is not None and step == self._failed_step:
            raise ended(failure, f"step {step} failed again after a restart")
        if self.count >= self._most:
            raise ended(failure, f"the roles were already restarted {self.count} times, and max_restarts is {self._most}")
        self.count += 1
        if step is not None:
            self._failed_step = step
        now = self._clock()
        while self._recent and self._recent[0] <= now - RECENT_SECONDS:
            self._recent.popleft()
        self._recent.append(now)
        return BACK_OFF_SECONDS[min(len(self._recent), len(BACK_OFF_SECONDS)) - 1]


def ended(failure: WorkerFailed, why: str) -> WorkerFailed:
    """Return a copy of the failure that also states why it ends the run."""
    return type(failure)(failure.role, failure.rank, f"{failure.cause}; {why}", failure.traceback)
