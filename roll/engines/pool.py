"""The engines of a role: tracks which of them serve, and restarts dead ones.

    a call fails ──▶ the engine has died ──▶ DEAD, and a task replaces its process ──▶ STALE ──weight sync──▶ HEALTHY
                 └─▶ the engine is alive ──▶ the failure is raised

An engine that dies twice of the same exception before it has answered any request is not restarted again, because a
restart cannot help. A restart waits while a sync is in progress, and while other roles are on the engines' devices. All
live engines are probed periodically.

The state machine of each engine. It uses no processes and no tasks, and its clock is passed in.

    HEALTHY ◀──▶ SUSPECT ──▶ DEAD ──▶ RESTARTING ──▶ STALE ──▶ HEALTHY
                              └──▶ RETIRED, after RESTARTS, or at once if a restart cannot help

An engine that dies becomes DEAD from any state. An engine that misses the deadline of a request becomes SUSPECT, but
still serves. After MOST_LATE late requests in a row it counts as dead; after an answered request it is HEALTHY again. A
restarted engine is STALE, and gets no requests, until it has the policy's weights. A restart cannot help an engine that
dies twice of the same exception before it has answered any request.

Chooses the engine for the next samples, and limits the running samples of each engine. It only counts, without a
clock or tasks.

    waiting samples, in order ──▶ the engine with the most room ──▶ when a sample ends, the next one may start

The samples of a prompt go to one engine if it has room for all of them, so that they share a prefill. A turn of an
episode goes to the engine that answered the previous turn, if that has room, and reuses its prefix. Samples that do not
fit wait in the driver, where any engine can take them, and not in the queue of a busy engine.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Concatenate, ParamSpec, TypeVar

from roll.backend import EngineActivity, GenerateStrategy
from roll.errors import BadInput, EngineShortage, RollError, WorkerDied, WorkerFailed, WorkerLate
from roll.ray.device_sharing import run_together
from roll.ray.group import LOOK_SECONDS, WorkerGroup
from roll.ray.process import root_cause
from roll.system.ranked import Ranked
from roll.system.restart_budget import RestartBudget

FULL = 0.9
"""Smallest KV-cache use, from 0 to 1, at which a preemption counts as a lack of room. At a lower use, a weight update
may be its cause.
"""
SPARE = 0.6
"""KV-cache use, from 0 to 1, below which a limit that was reached is raised."""
LOWERED, RAISED = 0.8, 1.25
"""Factors by which a limit is lowered after a lack of room, and raised. In all other cases it stays the same."""


@dataclass
class RunningLimit:
    """Limits an engine's concurrent samples: first to its own limit, then to a load without preemptions."""

    most: int
    """Largest value of the limit."""
    adapts: bool
    """Whether the limit follows the engine's KV cache. Otherwise it is constant."""

    def __post_init__(self) -> None:
        self.samples = self.most

    def adapt(self, activity: EngineActivity, most_running: int) -> None:
        """Adapt the limit to the engine's activity in a step. `most_running` is its most concurrent samples."""
        if not self.adapts or activity.preemptions is None:
            return
        use = activity.kv_cache_use or 0.0
        if activity.preemptions and use >= FULL:
            self.samples = max(1, int(LOWERED * min(self.samples, most_running)))
        elif use < SPARE and most_running >= self.samples:
            self.samples = min(self.most, int(RAISED * self.samples) + 1)


def running_limits(engines: int, most: int | None, engine_takes: int | None) -> list[RunningLimit] | None:
    """Return the limit of each engine, or None if the engines are unlimited.

    Args:
        most: constant limit for all engines together, at least one sample for each; None adapts the limits to the KV
            caches.
        engine_takes: largest number of concurrent samples of an engine; None if unlimited.
    """
    if most is not None:
        return [RunningLimit(most // engines + (engine < most % engines), adapts=False) for engine in range(engines)]
    return None if engine_takes is None else [RunningLimit(engine_takes, adapts=True) for _ in range(engines)]


class Running:
    """Tracks the samples that each engine runs, and its remaining room."""

    def __init__(self, limits: list[RunningLimit] | None, engines: int) -> None:
        """If `limits` is None, an engine takes any number of samples."""
        assert limits is None or len(limits) == engines
        self._limits = limits
        self._running = [0] * engines
        self._most = [0] * engines
        self.serve(range(engines), ())

    def serve(self, engines: Sequence[int], suspect: Collection[int]) -> None:
        """Allow only these engines from now on. A `suspect` one is chosen only if it has the most room."""
        self._serving, doubtful = list(engines), frozenset(suspect)
        self._trusted = Ranked({engine: self._key(engine) for engine in engines if engine not in doubtful})
        self._suspect = Ranked({engine: self._key(engine) for engine in engines if engine in doubtful})

    def _key(self, engine: int) -> tuple[int, int]:
        """Return the rank of an engine among others: the most room first, then the fewest samples."""
        running = self._running[engine]
        return (0 if self._limits is None else running - self._limits[engine].samples), running

    def _count(self, engine: int, samples: int) -> None:
        """Add to the samples that an engine runs."""
        self._running[engine] += samples
        for ranked in (self._trusted, self._suspect):
            if engine in ranked:
                ranked[engine] = self._key(engine)

    def place(self, samples: int, home: int | None = None) -> tuple[int, int]:
        """Choose an engine for samples of one prompt. Return it and the number of samples that it takes, 0 if no engine
        has room.

        Args:
            home: engine whose cache has the prefix of the samples. It is preferred if it is not suspect and has room
                for all of them.
        """
        engine = home
        if home is None or home not in self._trusted or self._room(home, samples) < samples:
            engine = self._roomiest(samples)
        if engine is None:
            return 0, 0
        taken = self._room(engine, samples)
        if taken:
            self._count(engine, taken)
            self._most[engine] = max(self._most[engine], self._running[engine])
        return engine, taken

    def _roomiest(self, samples: int) -> int | None:
        trusted, suspect = self._trusted.first(), self._suspect.first()
        if trusted is None or suspect is None:
            return suspect if trusted is None else trusted
        return suspect if self._room(suspect, samples) > self._room(trusted, samples) else trusted

    def leave(self, engine: int, samples: int) -> None:
        """Record that `samples` samples of an engine have ended."""
        self._count(engine, -samples)

    def adapt(self, activities: Mapping[int, EngineActivity]) -> None:
        """Adapt the limits to the engines' activity since the last call."""
        limits = self._limits or ()
        for engine, limit in enumerate(limits):
            if engine in activities:
                limit.adapt(activities[engine], self._most[engine])
                self._count(engine, 0)
        self._most = list(self._running)

    @property
    def can_serve(self) -> bool:
        """Whether any engine accepts requests, perhaps without room at present."""
        return bool(self._serving)

    @property
    def limit(self) -> int | None:
        """Largest number of concurrent samples of all serving engines together; None without limits."""
        return None if self._limits is None else sum(self._limits[engine].samples for engine in self._serving)

    def _room(self, engine: int, samples: int) -> int:
        """Return how many more samples an engine can take, at most `samples`."""
        if self._limits is None:
            return samples
        return max(0, min(samples, self._limits[engine].samples - self._running[engine]))


RESTARTS = RestartBudget(most=5)
"""Bounds the restarts of one engine in a run. If it dies once more, it is retired."""
RETURNS = RestartBudget(most=sys.maxsize)
"""Bounds the returns of a server outside the run: it may leave the pool and return as often as it likes."""
MOST_LATE = 3
"""Number of consecutive late requests after which an engine counts as dead."""


NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
"""Addresses, process ids and times in an exception, which differ between two deaths of the same exception."""


FAULT = re.compile(r"died of SIG(?:ILL|SEGV|ABRT|FPE|BUS)\b")
"""In a cause of death, a signal that a process raises itself by a fault of its code."""


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
    restarts: list[float] = field(default_factory=list)
    """The times of its restarts."""
    late: int = 0
    died_at: float = 0.0
    has_answered: bool = False
    exceptions: dict[str, str] = field(default_factory=dict)
    """The causes of its deaths by exceptions. Key: the exception without its numbers."""
    repeated: str | None = None
    """The cause of the first of two deaths of the same exception, before any answer; None without one."""


class EngineHealth:
    """The states of all engines of a role, by number."""

    def __init__(
        self, engines: int, clock: Callable[[], float] = time.monotonic, restarts: RestartBudget = RESTARTS
    ) -> None:
        """Start with healthy engines. `clock` returns seconds."""
        self._engines, self._clock, self._restarts = [_Engine() for _ in range(engines)], clock, restarts

    def state(self, engine: int) -> EngineState:
        """Return the state of one engine."""
        return self._engines[engine].state

    def restarts(self, engine: int) -> int:
        """Return the number of restarts of an engine, which identifies its current process."""
        return len(self._engines[engine].restarts)

    @property
    def all_restarts(self) -> int:
        """Total number of restarts of all engines."""
        return sum(len(engine.restarts) for engine in self._engines)

    def in_states(self, states: Collection[EngineState]) -> list[int]:
        """Return the numbers of the engines in one of these states, in order."""
        return [number for number, engine in enumerate(self._engines) if engine.state in states]

    @property
    def all_retired(self) -> bool:
        """Whether no engine will ever serve again."""
        return len(self.in_states([EngineState.RETIRED])) == len(self._engines)

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
        """Note that the engine died, of this exception; None if it raised none. Return False if its death was already
        known.

        `cause` is what a report says of the death, the exception included.
        """
        found = self._engines[engine]
        if found.state in (EngineState.DEAD, EngineState.RETIRED):
            return False
        if (
            found.state is not EngineState.RESTARTING
        ):  # after a failed restart, the downtime still counts from the first death
            found.died_at = self._clock()
        if exception is not None:
            alike = NUMBER.sub("#", exception)
            found.repeated = None if found.has_answered else found.exceptions.get(alike)
            found.exceptions.setdefault(alike, cause or exception)
        is_last = found.repeated is not None or self._restarts.delay(found.restarts, self._clock()) is None
        found.state = EngineState.RETIRED if is_last else EngineState.DEAD
        return True

    def restarting(self, engine: int) -> None:
        """Note that the engine gets a new process."""
        found = self._engines[engine]
        assert found.state is EngineState.DEAD, f"engine {engine} is {found.state}"
        found.restarts.append(self._clock())
        found.state, found.late = EngineState.RESTARTING, 0

    def loaded(self, engine: int) -> float:
        """Note that the engine's new process waits for weights. Return the seconds since the engine's death."""
        found = self._engines[engine]
        assert found.state is EngineState.RESTARTING, f"engine {engine} is {found.state}"
        found.state = EngineState.STALE
        return self._clock() - found.died_at

    def has_weights(self, engine: int) -> None:
        """Note that the engine has the policy's weights."""
        if self._engines[engine].state is EngineState.STALE:
            self._engines[engine].state = EngineState.HEALTHY


P = ParamSpec("P")
R = TypeVar("R")
LOG = logging.getLogger(__name__)
PROBE_EVERY = 10.0
"""Interval between two probes of the engines, in seconds."""


class EnginePool:
    """The engines of one role. For use in one event loop; must be closed before its group is stopped."""

    def __init__(
        self,
        group: WorkerGroup[GenerateStrategy],
        start_seconds: float,
        takes_weights: bool,
        changed: Callable[[], None],
        answers: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """
        Args:
            start_seconds: deadline of each part of a restart.
            takes_weights: whether a restarted engine must receive the policy's weights in a sync before it serves.
            changed: called when the state of an engine has changed or `failure` was set.
            answers: waits until the server of an engine answers, if the engines are servers outside the run. If one
                has not answered for `start_seconds` and no other is present, `failure` is set.
        """
        self._answers = answers
        self._group, self._start_seconds, self._takes_weights, self._changed = (
            group,
            start_seconds,
            takes_weights,
            changed,
        )
        self._health = EngineHealth(len(group), restarts=RESTARTS if answers is None else RETURNS)
        self._restarting: dict[int, asyncio.Task[None]] = {}
        self._probing: asyncio.Task[None] | None = None
        self._may_restart = asyncio.Event()
        self._may_restart.set()
        self._in_sync = self._is_away = False
        self._news = asyncio.Event()
        self.failure: Exception | None = None
        """The failure that ends the run: no engine will serve again, or a restart cannot help. None without one."""

    @property
    def serving(self) -> list[int]:
        """Engines that accept requests."""
        return self._health.in_states(SERVING)

    @property
    def suspect(self) -> list[int]:
        """Engines that still accept requests, but missed the deadline of their last one."""
        return self._health.in_states([EngineState.SUSPECT])

    @property
    def stale(self) -> list[int]:
        """Restarted engines that wait for weights."""
        return self._health.in_states([EngineState.STALE])

    @property
    def present(self) -> dict[int, int]:
        """Engines with a live process, mapped to their numbers of restarts."""
        return {engine: self._health.restarts(engine) for engine in self._health.in_states(PRESENT)}

    @property
    def restarts(self) -> int:
        """Total number of restarts of engines in the run."""
        return self._health.all_restarts

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition on the engines' states holds. Raise `failure` if it is set before that."""
        while not holds():
            if self.failure is not None:
                raise self.failure
            await self._news.wait()

    def wake(self) -> None:
        """Make the tasks in `until` check their conditions again."""
        self._news.set()
        self._news = asyncio.Event()

    def process(self, engine: int) -> int:
        """Return the number of an engine's current process, for `explained`. Raises WorkerDied if there is none."""
        state = self._health.state(engine)
        if state not in PRESENT:
            raise WorkerDied(self._group.role, engine, f"it is {state}")
        return self._health.restarts(engine)

    def answered(self, engine: int) -> None:
        """Note that an engine answered a request."""
        was_suspect = self._health.state(engine) is EngineState.SUSPECT
        self._health.answered(engine)
        if was_suspect:
            self._notify_engines()

    async def one(
        self,
        engine: int,
        seconds: float,
        method: Callable[Concatenate[GenerateStrategy, P], Coroutine[Any, Any, R]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> R:
        """Call a method of one engine and return its result. Raise `WorkerDied` if the engine has died."""
        process = self.process(engine)
        try:
            return await self._group.within(seconds).one(engine, method, *arguments, **named)
        except RollError as error:
            raise await self.explained(engine, process, error) from error

    async def each(
        self,
        seconds: float,
        method: Callable[Concatenate[GenerateStrategy, P], Coroutine[Any, Any, R]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> dict[int, R]:
        """Call a method of every live engine. Return the results by engine, without those that die meanwhile."""
        said: dict[int, R] = {}

        async def ask(engine: int) -> None:
            try:
                said[engine] = await self.one(engine, seconds, method, *arguments, **named)
            except WorkerDied:
                return  # its death was reported, and it restarts

        await run_together(ask(engine) for engine in self.present)
        return said

    async def explained(self, engine: int, process: int, error: RollError) -> RollError:
        """Return the failure of a call on an engine: `WorkerDied` if it has died, otherwise `error`. Report a death."""
        if process != self._health.restarts(engine):
            return WorkerDied(self._group.role, engine, str(error))
        if isinstance(error, WorkerDied):
            cause = error.cause
        elif isinstance(error, BadInput):
            return error
        else:
            cause = await self._cause_of_death(engine)
        if cause is None:
            return error
        self.report_dead(engine, cause)
        return WorkerDied(self._group.role, engine, cause)

    def begin_probes(self) -> None:
        """Probe the engines from now on, so that a dead one is replaced before a request needs it."""
        self._probing = self._probing or asyncio.create_task(self._probe_all())

    async def _probe_all(self) -> None:
        while True:
            await asyncio.sleep(PROBE_EVERY)
            await run_together(self._probe(engine, process) for engine, process in self.present.items())

    async def _probe(self, engine: int, process: int) -> None:
        """Report an engine as dead if its process is gone or has a fatal error. A late answer may only mean busy."""
        try:
            cause = await self._group.within(LOOK_SECONDS).one(engine, GenerateStrategy.cause_of_death)
        except WorkerFailed as error:
            cause = error.cause if isinstance(error, WorkerDied) else None
        if cause is not None and self._health.restarts(engine) == process:
            self.report_dead(engine, cause)

    async def _cause_of_death(self, engine: int) -> str | None:
        """Probe an engine after a failed call. Return its cause of death, or None if it is alive."""
        try:
            return await self._group.within(LOOK_SECONDS).one(engine, GenerateStrategy.cause_of_death)
        except WorkerFailed as error:
            return error.cause if isinstance(error, WorkerDied | WorkerLate) else None

    def report_late(self, engine: int, error: WorkerLate) -> None:
        """Note that a request missed its deadline."""
        if self._health.state(engine) not in SERVING:
            return
        if self._health.late(engine):
            self.report_dead(engine, f"{error.cause}, and the previous requests were late as well")
        self._notify_engines()

    def report_dead(self, engine: int, cause: str) -> None:
        """Start the restart of an engine that is dead, stopped or makes no progress. Idempotent."""
        if self._health.state(engine) not in PRESENT:
            return  # the restart itself reports its failure
        self._note_death(engine, cause)
        self._restarting[engine] = asyncio.create_task(self._restart(engine, cause))
        self._notify_engines()

    def _note_death(self, engine: int, cause: str, raised: bool = False) -> None:
        """Note a death. `raised`: the cause is an exception already; a kill or a silence may be an accident."""
        fault = FAULT.search(cause)
        exception = cause if raised else fault and fault[0]
        if self._answers is None and (root := root_cause(self._group.printed(engine))):
            exception, cause = root, f"{root}; {cause}"
        self._health.died(engine, exception, cause)
        role, restarts = self._group.role, self._health.restarts(engine)
        if engine in self._health.hopeless:
            LOG.warning(
                "%s rank %d died twice of the same exception before it answered any request, and is not restarted "
                "again: %s",
                role,
                engine,
                cause,
            )
        elif self._health.state(engine) is EngineState.RETIRED:
            LOG.warning(
                "%s rank %d died: %s. It was restarted %d times and is not restarted again",
                role,
                engine,
                cause,
                restarts,
            )
        elif self._answers is not None:
            LOG.warning("%s rank %d leaves the pool: %s. It returns when its server answers", role, engine, cause)
        else:
            LOG.warning("%s rank %d died: %s. It restarts (%d of %d)", role, engine, cause, restarts + 1, RESTARTS.most)

    async def _restart(self, engine: int, cause: str) -> None:
        try:
            # A sync holds back restarts, and would wait for calls that vLLM no longer answers without its own process.
            await self._group.kill_rank(engine)
            while self._health.state(engine) is EngineState.DEAD:
                await self._server_answers(engine)
                await self._may_restart.wait()
                self._health.restarting(engine)
                try:
                    await self._group.replace(engine, self._start_seconds)
                except EngineShortage:  # the next restart would lack memory as well
                    raise
                except WorkerFailed as error:
                    cause = error.cause
                    self._note_death(engine, cause, raised=not isinstance(error, WorkerDied | WorkerLate))
                else:
                    self._is_back(engine)
            if self._health.all_retired:
                self.failure = self._last_death(engine, cause)
        except Exception as error:
            self.failure = error
        self._notify_engines()

    async def _server_answers(self, engine: int) -> None:
        """Wait until an engine's server answers, if it has one. Raises WorkerLate if no server is left."""
        answered = self._answers is None
        while self._answers is not None and not answered:
            try:
                async with asyncio.timeout(self._start_seconds):
                    await self._answers(engine)
                    answered = True
            except TimeoutError:
                if not self._health.in_states(PRESENT):
                    said = f"no server has answered for {self._start_seconds:.0f} s (deadlines.start)"
                    raise WorkerLate(self._group.role, engine, said) from None

    def _last_death(self, engine: int, cause: str) -> WorkerDied:
        """Return the failure of a run whose engines are all retired: an exception that no restart helps comes first."""
        for hopeless, first in self._health.hopeless.items():
            said = (
                f"on host {self._group.host(hopeless)}, it died twice of the same exception before it answered any "
                f"request"
            )
            return WorkerDied(self._group.role, hopeless, f"{said}: {first}")
        said = f"it was restarted {RESTARTS.most} times, like all other engines, and died again"
        return WorkerDied(self._group.role, engine, f"{said}: {cause}")

    def _is_back(self, engine: int) -> None:
        seconds = self._health.loaded(engine)
        LOG.warning("%s rank %d is back after %.0f s", self._group.role, engine, seconds)
        if not self._takes_weights:
            self._health.has_weights(engine)

    def have_weights(self, engines: Collection[int]) -> None:
        """Note that these engines have the policy's weights."""
        for engine in engines:
            self._health.has_weights(engine)
        self._notify_engines()

    def _notify_engines(self) -> None:
        self._changed()
        self.wake()

    @contextmanager
    def in_sync(self) -> Iterator[None]:
        """A context in which no restart begins. An engine that dies during a sync restarts after it."""
        self._in_sync = True
        self._gate()
        try:
            yield
        finally:
            self._in_sync = False
            self._gate()

    async def leave_devices(self) -> None:
        """Hold back restarts, and wait for those in progress. Call it before other roles are onloaded."""
        self._is_away = True
        self._gate()
        await self.until(lambda: not self._health.in_states([EngineState.RESTARTING]))

    def come_back(self) -> None:
        """Allow restarts again. Call it when no other role is on the devices."""
        self._is_away = False
        self._gate()

    def _gate(self) -> None:
        if self._in_sync or self._is_away:
            self._may_restart.clear()
        else:
            self._may_restart.set()

    async def close(self) -> None:
        """Cancel restarts and probes."""
        tasks = [*self._restarting.values(), *([self._probing] if self._probing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
