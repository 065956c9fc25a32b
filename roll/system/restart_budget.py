"""How often a process may be restarted, and how long to wait before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

HOUR = 3600.0


@dataclass(frozen=True)
class RestartBudget:
    """A bound on restarts. All times are in seconds of one clock."""

    most: int
    """Largest number of restarts within `within`."""
    within: float = math.inf
    """Time after which a restart no longer counts towards `most`."""
    back_off: Sequence[float] = (0.0,)
    """Delays before the first, second and later restarts within an hour, as a fault may last for a while."""

    def delay(self, restarts: Sequence[float], now: float) -> float | None:
        """Return the seconds to wait before the next restart, or None if the budget is spent. `restarts` are the times
        of all earlier ones.
        """
        if _recent(restarts, now - self.within) >= self.most:
            return None
        return self.back_off[min(_recent(restarts, now - HOUR), len(self.back_off) - 1)]


def _recent(times: Sequence[float], begin: float) -> int:
    return sum(time > begin for time in times)
