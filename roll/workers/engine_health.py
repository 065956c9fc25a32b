"""The state of each engine. No processes and no tasks; the time comes from outside.

    HEALTHY ◀──▶ SUSPECT ──▶ DEAD ──▶ RESTARTING ──▶ STALE ──▶ HEALTHY
                              └──▶ RETIRED, after MOST_RESTARTS

An engine that dies is DEAD, whatever it was. SUSPECT is one that missed the deadline of a request; it still serves. MOST_LATE requests in
a row make it DEAD, one that is answered makes it HEALTHY. A restarted engine is STALE, and gets no requests, until it has the policy's
weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

MOST_RESTARTS = 5
"""Largest number of restarts of an engine in a run. It is retired if it dies once more."""
MOST_LATE = 3
"""Requests in a row that miss their deadline at an engine."""


class EngineState(StrEnum):
    """See the module."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"
    RETIRED = "retired"


SERVING = (EngineState.HEALTHY, EngineState.SUSPECT)
"""May be given requests."""
PRESENT = (*SERVING, EngineState.STALE)
"""Has a process that answers calls."""


@dataclass
class _Engine:
    state: EngineState = EngineState.HEALTHY
    restarts: int = 0
    late: int = 0
    died_at: float = 0.0


class EngineHealth:
    """The states of all engines of a role, by number."""

    def __init__(self, engines: int, clock: Callable[[], float] = time.monotonic) -> None:
        """All are healthy. `clock` gives seconds."""
        self._engines, self._clock = [_Engine() for _ in range(engines)], clock

    def state(self, engine: int) -> EngineState:
        """The state of one engine."""
        return self._engines[engine].state

    def restarts(self, engine: int) -> int:
        """How often an engine was restarted; tells the processes that have had its number apart."""
        return self._engines[engine].restarts

    @property
    def all_restarts(self) -> int:
        """Restarts of all engines together."""
        return sum(engine.restarts for engine in self._engines)

    def those(self, states: Collection[EngineState]) -> list[int]:
        """The engines in one of these states, in order."""
        return [number for number, engine in enumerate(self._engines) if engine.state in states]

    @property
    def all_retired(self) -> bool:
        """Whether no engine will ever serve again."""
        return len(self.those([EngineState.RETIRED])) == len(self._engines)

    def answered(self, engine: int) -> None:
        """It answered a request."""
        found = self._engines[engine]
        found.late = 0
        if found.state is EngineState.SUSPECT:
            found.state = EngineState.HEALTHY

    def late(self, engine: int) -> bool:
        """A request missed its deadline. Whether it was one too many: the engine is to be reported dead."""
        found = self._engines[engine]
        found.late += 1
        if found.state is EngineState.HEALTHY:
            found.state = EngineState.SUSPECT
        return found.late >= MOST_LATE

    def died(self, engine: int) -> bool:
        """It has died. False if that is known."""
        found = self._engines[engine]
        if found.state in (EngineState.DEAD, EngineState.RETIRED):
            return False
        if found.state is not EngineState.RESTARTING:  # the time without it goes on
            found.died_at = self._clock()
        found.state = EngineState.RETIRED if found.restarts >= MOST_RESTARTS else EngineState.DEAD
        return True

    def restarting(self, engine: int) -> None:
        """It gets a new process."""
        found = self._engines[engine]
        assert found.state is EngineState.DEAD, f"engine {engine} is {found.state}"
        found.state, found.restarts, found.late = EngineState.RESTARTING, found.restarts + 1, 0

    def loaded(self, engine: int) -> float:
        """Its new process is ready and waits for weights. The seconds since it died."""
        found = self._engines[engine]
        assert found.state is EngineState.RESTARTING, f"engine {engine} is {found.state}"
        found.state = EngineState.STALE
        return self._clock() - found.died_at

    def has_weights(self, engine: int) -> None:
        """It has the policy's weights."""
        if self._engines[engine].state is EngineState.STALE:
            self._engines[engine].state = EngineState.HEALTHY
