"""The state machine of each engine. It uses no processes and no tasks, and its clock is passed in.

    HEALTHY ◀──▶ SUSPECT ──▶ DEAD ──▶ RESTARTING ──▶ STALE ──▶ HEALTHY
                              └──▶ RETIRED, after MOST_RESTARTS, or at once if a restart cannot help

An engine that dies becomes DEAD from any state. An engine that misses the deadline of a request becomes SUSPECT, but still serves. After
MOST_LATE late requests in a row it counts as dead; after an answered request it is HEALTHY again. A restarted engine is STALE, and gets
no requests, until it has the policy's weights. A restart cannot help an engine that dies twice of the same exception before it has
answered any request.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum

MOST_RESTARTS = 5
"""Largest number of restarts of one engine in a run. If it dies once more, it is retired."""
MOST_LATE = 3
"""Number of consecutive late requests after which an engine counts as dead."""


NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
"""Addresses, process ids and times in an exception, which differ between two deaths of the same exception."""


class EngineState(StrEnum):
    """State of an engine; see the docstring of the module."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"
    RETIRED = "retired"


SERVING = (EngineState.HEALTHY, EngineState.SUSPECT)
"""States of an engine that accepts requests."""
PRESENT = (*SERVING, EngineState.STALE)
"""States of an engine with a process that answers calls."""


@dataclass
class _Engine:
    state: EngineState = EngineState.HEALTHY
    restarts: int = 0
    late: int = 0
    died_at: float = 0.0
    has_answered: bool = False
    exceptions: dict[str, str] = field(default_factory=dict)
    """The causes of its deaths by exceptions. Key: the exception without its numbers."""
    repeated: str | None = None
    """The cause of the first of two deaths of the same exception, before it answered any request; None if there is none."""


class EngineHealth:
    """The states of all engines of a role, by number."""

    def __init__(self, engines: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with healthy engines. `clock` returns seconds."""
        self._engines, self._clock = [_Engine() for _ in range(engines)], clock

    def state(self, engine: int) -> EngineState:
        """Return the state of one engine."""
        return self._engines[engine].state

    def restarts(self, engine: int) -> int:
        """Return the number of restarts of an engine, which identifies its current process."""
        return self._engines[engine].restarts

    @property
    def all_restarts(self) -> int:
        """Total number of restarts of all engines."""
        return sum(engine.restarts for engine in self._engines)

    def those(self, states: Collection[EngineState]) -> list[int]:
        """Return the numbers of the engines in one of these states, in order."""
        return [number for number, engine in enumerate(self._engines) if engine.state in states]

    @property
    def all_retired(self) -> bool:
        """Whether no engine will ever serve again."""
        return len(self.those([EngineState.RETIRED])) == len(self._engines)

    @property
    def hopeless(self) -> dict[int, str]:
        """The engines that were retired because a restart cannot help, with the cause of their first such death."""
        return {number: engine.repeated for number, engine in enumerate(self._engines) if engine.repeated is not None}

    def answered(self, engine: int) -> None:
        """Note that the engine answered a request."""
        found = self._engines[engine]
        found.late, found.has_answered = 0, True
        if found.state is EngineState.SUSPECT:
            found.state = EngineState.HEALTHY

    def late(self, engine: int) -> bool:
        """Note that a request missed its deadline. Return whether the engine now counts as dead."""
        found = self._engines[engine]
        found.late += 1
        if found.state is EngineState.HEALTHY:
            found.state = EngineState.SUSPECT
        return found.late >= MOST_LATE

    def died(self, engine: int, exception: str | None = None, cause: str = "") -> bool:
        """Note that the engine died, of this exception; None if it raised none. Return False if its death was already known.

        `cause` is what a report says of the death, the exception included.
        """
        found = self._engines[engine]
        if found.state in (EngineState.DEAD, EngineState.RETIRED):
            return False
        if found.state is not EngineState.RESTARTING:  # after a failed restart, the downtime still counts from the first death
            found.died_at = self._clock()
        if exception is not None:
            alike = NUMBER.sub("#", exception)
            found.repeated = None if found.has_answered else found.exceptions.get(alike)
            found.exceptions.setdefault(alike, cause or exception)
        is_last = found.repeated is not None or found.restarts >= MOST_RESTARTS
        found.state = EngineState.RETIRED if is_last else EngineState.DEAD
        return True

    def restarting(self, engine: int) -> None:
        """Note that the engine gets a new process."""
        found = self._engines[engine]
        assert found.state is EngineState.DEAD, f"engine {engine} is {found.state}"
        found.state, found.restarts, found.late = EngineState.RESTARTING, found.restarts + 1, 0

    def loaded(self, engine: int) -> float:
        """Note that the engine's new process is ready and waits for weights. Return the seconds since the engine's death."""
        found = self._engines[engine]
        assert found.state is EngineState.RESTARTING, f"engine {engine} is {found.state}"
        found.state = EngineState.STALE
        return self._clock() - found.died_at

    def has_weights(self, engine: int) -> None:
        """Note that the engine has the policy's weights."""
        if self._engines[engine].state is EngineState.STALE:
            self._engines[engine].state = EngineState.HEALTHY
