"""The environment workers: Ray actors anywhere in the cluster, each of which runs environments in a child process."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from roll.agents.environments.base import MalformedCalls, Message, Observation, Step
from roll.agents.environments.checked import ToldStep
from roll.agents.environments.process import EnvironmentProcess
from roll.agents.tool_failures import ToolFailure
from roll.backend import Rank
from roll.config.schema.environments import EnvironmentConfig
from roll.errors import EnvironmentFailed, NeighbourFailed, RollError, WorkerStopped
from roll.hosted.worker import SLACK, HostedSettings, HostedWorker
from roll.ray.group import WorkerGroup
from roll.ray.replacement import Replaced
from roll.system.ranked import LeastBusy
from roll.types import Metrics

R = TypeVar("R")
LOG = logging.getLogger(__name__)
COUNTED = {"crashed": "episode/crashed", "timed_out": "episode/timed_out", "neighbours_lost": "episode/neighbours_lost"}
"""Counted failures of environments, and their metrics."""


ToolFailed = Callable[[str, ToolFailure], None]
"""Is told about a failure of a tool: its domain, and the failure."""


def _logged(domain: str, failure: ToolFailure) -> None:
    LOG.warning("environments.%s: the tool '%s' failed: %s", domain, failure.tool, failure.trace or failure.note)


@dataclass(frozen=True)
class EnvironmentSettings(HostedSettings[EnvironmentConfig]):
    """Settings of `EnvironmentWorker`."""

    sees: bool = False
    """Whether the policy sees pictures."""

    def build(self, rank: Rank) -> EnvironmentWorker:
        return EnvironmentWorker(self)


class EnvironmentWorker(HostedWorker[EnvironmentProcess]):
    """Holds environments in a Ray actor. Failures of environments are returned, not raised."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        super().__init__(EnvironmentProcess(settings.domain, settings.section, settings.start_seconds, settings.sees))

    async def open(
        self, session: int, row: Mapping[str, Any], seed: int
    ) -> tuple[Observation, MalformedCalls] | EnvironmentFailed:
        try:
            return await self._process.open(session, row, seed), self._process.malformed_calls
        except EnvironmentFailed as failed:
            return failed

    async def step(self, session: int, message: Message) -> Step | EnvironmentFailed:
        try:
            return await self._process.step(session, message)
        except EnvironmentFailed as failed:
            return failed

    async def hear(self, session: int, partner: str, text: str) -> Step | EnvironmentFailed:
        try:
            return await self._process.hear(session, partner, text)
        except EnvironmentFailed as failed:
            return failed

    async def end(self, session: int) -> None:
        await self._process.end(session)


class EnvironmentWorkers:
    """Facade of the environment groups: opens each session in the worker of its domain that has the fewest sessions.

    If a worker dies, its sessions fail, and its replacement accepts new ones. For use in one event loop.
    """

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup[EnvironmentWorker]],
        sections: Mapping[str, EnvironmentConfig],
        start_seconds: float,
        tool_failed: ToolFailed = _logged,
    ) -> None:
        """
        Args:
            start_seconds: deadline for each part of the start of a replacement worker.
            tool_failed: is told about the failures of tools that are new to an environment process.
        """
        self._domains = {
            domain: _Domain(group, sections[domain], start_seconds, partial(tool_failed, domain))
            for domain, group in groups.items()
        }

    async def open(self, domain: str, row: Mapping[str, Any], seed: int) -> WorkerSession:
        """Return a fresh environment after its `reset`, once there is room. Raises EnvironmentFailed if it fails."""
        return await self._domains[domain].open(row, seed)

    def metrics(self) -> Metrics:
        """Return the numbers of environments that crashed, timed out or lost a neighbour since the last call."""
        counts = sum((domain.counts for domain in self._domains.values()), Counter[str]())
        for domain in self._domains.values():
            domain.counts.clear()
        return {metric: float(counts[name]) for name, metric in COUNTED.items()}


class _Domain:
    """The workers of a domain."""

    def __init__(
        self,
        group: WorkerGroup[EnvironmentWorker],
        section: EnvironmentConfig,
        start_seconds: float,
        tool_failed: Callable[[ToolFailure], None],
    ) -> None:
        self._tool_failed = tool_failed
        self.workers, self.counts = Replaced(group, start_seconds), Counter[str]()
        self._room = asyncio.Semaphore(len(group) * section.sessions_per_process)
        self._sessions = LeastBusy(len(group))
        self._number = 0
        # A call may wait for one call of every other session, each up to its timeout, and for a replacement of the
        # process.
        self.seconds = section.step_timeout * 2 * (section.sessions_per_process + 1) + start_seconds + SLACK

    async def open(self, row: Mapping[str, Any], seed: int) -> WorkerSession:
        await self._room.acquire()
        worker, _ = self._sessions.take(1)
        session = WorkerSession(self, worker, self._number)
        self._number += 1
        try:
            method, given = EnvironmentWorker.open, (session.number, row, seed)
            opened = await self.workers.one(worker, self.seconds, method, *given)
            session.observation, session.malformed_calls = self.had(opened)
        except EnvironmentFailed:  # the environment is already closed
            self.leave(worker)
            raise
        except BaseException:  # the environment may be open
            await session.close()
            raise
        return session

    def had(self, returned: R | EnvironmentFailed) -> R:
        """Return the result of a worker, or count and raise it if it is a failure. Report failures of tools."""
        for failure in returned.tool_failures if isinstance(returned, ToldStep) else ():
            self._tool_failed(failure)
        if isinstance(returned, EnvironmentFailed):
            self.counts["neighbours_lost" if isinstance(returned, NeighbourFailed) else returned.reason] += 1
            raise returned
        return returned

    def leave(self, worker: int) -> None:
        """Note that a session of the worker has ended."""
        self._sessions.leave(worker, 1)
        self._room.release()


class WorkerSession:
    """An environment in a worker; implements `EnvironmentSession` of roll/agents/episodes.py."""

    observation: Observation
    malformed_calls: MalformedCalls

    def __init__(self, domain: _Domain, worker: int, number: int) -> None:
        self._domain, self._worker, self.number = domain, worker, number
        self._closing: asyncio.Task[None] | None = None

    async def step(self, message: Message) -> Step:
        """Send the model's message and return the environment's step. Raises EnvironmentFailed if it fails."""
        one = self._domain.workers.one
        return self._domain.had(
            await one(self._worker, self._domain.seconds, EnvironmentWorker.step, self.number, message)
        )

    async def hear(self, partner: str, text: str) -> Step:
        """Send a partner's turn and return the environment's step. Raises EnvironmentFailed if it fails."""
        given = (self.number, partner, text)
        return self._domain.had(
            await self._domain.workers.one(self._worker, self._domain.seconds, EnvironmentWorker.hear, *given)
        )

    async def close(self) -> None:
        """Close the environment in the background, and free its place afterwards."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        try:
            await self._domain.workers.one(self._worker, self._domain.seconds, EnvironmentWorker.end, self.number)
        except WorkerStopped:  # the environment has ended with its process
            pass
        except RollError as error:
            LOG.warning("an environment was not closed: %s", error)  # the next call of the worker raises the error
        finally:
            self._domain.leave(self._worker)
