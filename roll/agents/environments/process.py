"""Runs the environments of a domain in a child process (roll/hosted/process.py), which holds those of many sessions.

All sessions of a child that is lost fail. If a call timed out, its session fails with that cause, and the others fail
with NeighbourFailed. Otherwise every call in progress fails with the cause, and the sessions without one fail with
NeighbourFailed at their next call. The next session gets a new child.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.agents.containers.container import ContainerBounds, ContainerSettings
from roll.agents.environments.base import MalformedCalls, Message, Observation, Step
from roll.agents.environments.checked import (
    Call,
    EnvironmentAssignment,
    McpServer,
    Method,
    late,
    outcome_of,
    read_malformed_calls,
)
from roll.config.derived.domains import SHELL, environment_of
from roll.config.schema.environments import EnvironmentConfig
from roll.errors import EnvironmentFailed, NeighbourFailed
from roll.hosted.process import HostedProcess, Hosting, Loss, settle
from roll.hosted.protocol import Reply
from roll.system.sizes import GIB, MIB
from roll.system.tree import TreeBounds

LOG = logging.getLogger(__name__)
CHILD = "roll.agents.environments.child"


@dataclass(eq=False)
class _SessionCall:
    """A call of one method of one session's environment."""

    session: int
    method: Method
    given: tuple[Any, ...]
    done: asyncio.Future[Any]


class EnvironmentProcess(HostedProcess[_SessionCall, MalformedCalls]):
    """Holds the environments of one domain. Must be used from a single asyncio event loop."""

    def __init__(self, domain: str, section: EnvironmentConfig, start_seconds: float, sees: bool = False) -> None:
        """
        Args:
            section: the domain's block.
            start_seconds: deadline for the child to start and to import.
            sees: whether the policy sees pictures.
        """
        bounds = tree_bounds(domain, section)
        servers = tuple(McpServer(one.command or (), one.url, one.call_timeout) for one in section.mcp)
        name, given = environment_of(domain, section), section.environment_args
        assignment = EnvironmentAssignment(
            *(domain, section.step_timeout, int(section.memory_gib * GIB), name, given, section.tools, servers),
            containers=container_settings(section),
            partners=tuple(section.partners),
            sees=sees,
        )
        place, envs = f"environments.{domain}", section.system_envs
        hosting = Hosting(CHILD, "environment", place, "reply", assignment, envs, bounds, start_seconds)
        super().__init__(hosting, read_malformed_calls)
        self._waiting: deque[_SessionCall] = deque()
        self._sessions: dict[int, str] = {}
        """By session: why its child was lost; empty while it has one."""

    @property
    def malformed_calls(self) -> MalformedCalls:
        """See `MalformedCalls`; known once the child has started."""
        return self._traits or "answer"

    async def open(self, session: int, row: Mapping[str, Any], seed: int) -> Observation:
        """Create an environment under a new session number, and reset it. If this fails, the environment is closed.

        Raises:
            EnvironmentFailed: the environment raised or exceeded its deadline, or its process was lost.
            ConfigError, HostedProcessFailed: a lost child could not be replaced.
        """
        self._check_open()
        self._sessions[session] = ""
        try:
            return await self._ask(session, "reset", (row, seed))
        except BaseException:
            await self.end(session)
            raise

    async def step(self, session: int, message: Message) -> Step:
        """Take one step of a session. Raises EnvironmentFailed if it raised or was late, or its process was lost."""
        self._check_alive(session)
        return await self._ask(session, "step", (message,))

    def _check_alive(self, session: int) -> None:
        if session not in self._sessions:
            raise NeighbourFailed("the worker that held the environment's process was replaced")
        if why := self._sessions[session]:
            raise _lost_with_process(why)

    async def hear(self, session: int, partner: str, text: str) -> Step:
        """Pass a partner's turn to a session. Raises EnvironmentFailed as `step` does."""
        self._check_alive(session)
        return await self._ask(session, "hear", (partner, text))

    async def end(self, session: int) -> None:
        """Close the environment of a session, if there is one. Errors are only logged."""
        if self._sessions.pop(session, "none") or self._closed:
            return
        try:
            await self._ask(session, "close", ())
        except EnvironmentFailed as failed:
            LOG.warning("%s: %s", self._hosting.place, failed)

    async def _ask(self, session: int, method: Method, given: tuple[Any, ...]) -> Any:
        """Make a call. It continues if the caller is cancelled: the child works on, and the next call must wait."""
        asked = _SessionCall(session, method, given, asyncio.get_running_loop().create_future())
        asked.done.add_done_callback(lambda done: done.cancelled() or done.exception())  # the caller may be gone
        self._waiting.append(asked)
        self._serve_soon()
        return await asyncio.shield(asked.done)

    @property
    def _concurrency(self) -> int | None:
        return None if self._side_by_side else 1

    def _has_waiting(self) -> bool:
        return bool(self._waiting)

    def _next_calls(self) -> list[Call]:
        if not self._side_by_side and self._sent:
            return []
        calls = []
        while self._waiting and (self._side_by_side or not calls):
            asked = self._waiting.popleft()
            number, (seal,) = self._register(asked, 1)
            calls.append(Call(number, seal, asked.session, asked.method, asked.given))
        return calls

    def _answered(self, call: _SessionCall, reply: Reply) -> None:
        outcome = outcome_of(call.method, reply)
        del self._sent[reply.number], self._begun[reply.number]
        if isinstance(outcome, EnvironmentFailed):
            settle(call.done, outcome)
        elif not call.done.done():
            call.done.set_result(outcome)

    def _lost(self, sent: Mapping[int, _SessionCall], begun: Sequence[int], loss: Loss) -> None:
        culprit = sent[begun[0]] if loss.is_late else None
        failed, more = EnvironmentFailed(loss.why), ""
        if culprit is not None:
            failed = late(culprit.method, culprit.given, self._hosting.assignment.timeout)
            more = "; the process was stopped (SIGSTOP)" if loss.disturbed else ""
        elif len(sent) > 1:
            more = f" ({len(sent)} calls were in progress)"
        fresh = {asked.session for asked in self._waiting if asked.method == "reset"}
        held = [session for session, why in self._sessions.items() if not why and session not in fresh]
        why = f"{failed.why}{more}"
        LOG.warning("%s: a process with %d sessions is lost: %s", self._hosting.place, len(held), why)
        self._sessions.update(dict.fromkeys(held, failed.why))
        for asked in sent.values():
            is_neighbour = culprit is not None and asked is not culprit
            settle(
                asked.done,
                _lost_with_process(failed.why) if is_neighbour else EnvironmentFailed(why, failed.reason),
            )
        others = [asked for asked in self._waiting if asked.session not in fresh]
        self._waiting = deque(asked for asked in self._waiting if asked.session in fresh)
        for asked in others:
            settle(asked.done, _lost_with_process(failed.why))

    def _abandon(self, error: BaseException) -> None:
        for asked in (*self._waiting, *(asked for _, asked in self._sent.values())):
            settle(asked.done, EnvironmentFailed("the process was closed") if self._closed else error)
        self._waiting.clear()
        self._sessions.update(dict.fromkeys(self._sessions, f"it failed: {error}"))


def container_settings(section: EnvironmentConfig) -> ContainerSettings:
    """Return how the environments of a domain hold their containers."""
    given = section.container
    memory, disk = (int(size * GIB / MIB) for size in (given.memory_gib, given.disk_gib))
    bounds = ContainerBounds(given.cpus, memory, disk, given.max_processes, given.network)
    return ContainerSettings(section.image, given.engine, bounds, given.warm, given.cache)


def tree_bounds(domain: str, section: EnvironmentConfig) -> TreeBounds:
    """Return the limits of an environment process with its descendants, to which containers of bubblewrap belong.

    Each episode may have two, its own and that of the verdict. Each has three processes beside those that it may start.
    """
    has_containers = section.image is not None or environment_of(domain, section) == SHELL
    containers = 2 * section.sessions_per_process + section.container.warm if has_containers else 0
    memory = section.memory_gib + containers * section.container.memory_gib
    processes = section.max_processes + containers * (section.container.max_processes + 3)
    return TreeBounds(int(memory * GIB), processes)


def _lost_with_process(why: str) -> NeighbourFailed:
    """Return the failure of a session that did not cause the loss of its process."""
    return NeighbourFailed(f"its process was ended because of another environment in it: {why}")
