"""Calls on independent, stateless ranks. A process that dies or hangs is replaced and the call repeated."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar, TypeVarTuple

from roll.errors import WorkerDied, WorkerFailed, WorkerLate
from roll.ray.group import WorkerGroup
from roll.system.restart_budget import HOUR, RestartBudget

S = TypeVar("S")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")
LOG = logging.getLogger(__name__)
REPLACEMENTS = RestartBudget(most=5, within=HOUR)
"""Bounds the replacements of a rank. The next failure ends the run."""


class Replaced(Generic[S]):
    """The ranks of a group, for calls that may be repeated. For use in one event loop."""

    def __init__(
        self, group: WorkerGroup[S], start_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`start_seconds` is the deadline for each part of a new process's start; `clock` returns seconds."""
        self._group, self._start_seconds, self._clock = group, start_seconds, clock
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._replacements: defaultdict[int, int] = defaultdict(int)
        self._failures: defaultdict[int, list[float]] = defaultdict(list)

    async def one(
        self, rank: int, seconds: float, method: Callable[[S, *Ts], Coroutine[Any, Any, R]], *arguments: *Ts
    ) -> R:
        """Call a method on one rank with a deadline. If its process dies or does not answer, repeat the call on a new
        process.

        Raises:
            WorkerFailed: the call raised an exception, or the rank failed more often than REPLACEMENTS allows.
            WorkerStopped: the group was stopped, which ended the call.
        """
        while True:
            async with self._turns[rank]:  # waits while the rank is being replaced
                which = self._replacements[rank]
            try:
                return await self._group.batched.within(seconds).one(rank, method, *arguments)
            except (WorkerDied, WorkerLate) as failed:
                await self._replace(rank, which, failed)

    async def _replace(self, rank: int, which: int, failed: WorkerFailed) -> None:
        """Replace the process of a rank, unless another failed call has already done so, or the group is stopped."""
        async with self._turns[rank]:
            self._group.check_running(rank)  # its end kills the processes of calls that nobody waits for
            while self._replacements[rank] == which:
                began = self._clock()
                self._count(rank, failed)
                LOG.warning(
                    "%s rank %d is replaced, and its unanswered calls are repeated: %s", failed.role, rank, failed.cause
                )
                try:
                    await self._group.replace(rank, self._start_seconds)
                except (WorkerDied, WorkerLate) as error:
                    failed = error
                else:
                    self._replacements[rank] += 1
                    LOG.warning("%s rank %d is back after %.0f s", failed.role, rank, self._clock() - began)

    def _count(self, rank: int, failed: WorkerFailed) -> None:
        now, failures = self._clock(), self._failures[rank]
        if REPLACEMENTS.delay(failures, now) is None:
            cause = f"{failed.cause}; it has been replaced {REPLACEMENTS.most} times within an hour"
            raise WorkerFailed(failed.role, failed.rank, cause, failed.traceback) from failed
        failures.append(now)
