"""Runs environments in a separate process that can be killed, so that they cannot hang, crash or block the run.

The child process (child.py) holds the environments of many sessions. It makes one call at a time for plain
environments, and concurrent calls for asynchronous ones. It is killed in three cases: a call exceeds its deadline and
the child does not end it itself; the child and its descendants exceed their limit of memory or processes; or the child
sends a message that is not the reply to a call in progress.

All sessions of a child that dies or is killed fail. If a call timed out, its session fails with that cause, and the
others fail with NeighbourFailed. Otherwise every call in progress fails with the cause, and the sessions without one
fail with NeighbourFailed at their next call. The next session gets a new child.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from roll.agents.environments.base import Message, Observation, Step
from roll.agents.hosting.messages import (
    Call,
    EnvironmentAssignment,
    EnvironmentReady,
    McpServer,
    Method,
    read_environment_ready,
    read_environment_reply,
    returned_value,
)
from roll.config.derived.environment_roles import environment_of
from roll.config.schema.environments import EnvironmentConfig
from roll.errors import ConfigError, EnvironmentFailed, NeighbourFailed, RollError
from roll.hosted.contained import CANCEL_SECONDS, Child, ChildDied
from roll.hosted.frames import Garbled, new_seals
from roll.system.sizes import GIB
from roll.system.tree import TreeBounds

LOG = logging.getLogger(__name__)
CHILD = "roll.agents.hosting.child"
GRACE_SECONDS = 0.1
"""Extra seconds to receive a reply that was sent in time, in case this process was busy."""
READ_SECONDS = 3600.0
"""Timeout of a single read, which is repeated."""
R = TypeVar("R")


class EnvironmentProcessFailed(RollError):
    """An environment process did not start."""


@dataclass(eq=False)
class _Pending:
    call: Call
    done: asyncio.Future[Any]


@dataclass(eq=False)
class _Held:
    """A child process, with its sessions and calls."""

    child: Child
    ready: EnvironmentReady = EnvironmentReady(())
    sessions: set[int] = field(default_factory=set)
    pending: dict[int, _Pending] = field(default_factory=dict)
    """Calls in progress, by number."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a call if calls must not run concurrently."""
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    lost: str = ""
    """Why the child was lost; empty while it is in use."""


class EnvironmentProcess:
    """Holds the environments of one domain. Must be used from a single asyncio event loop.

    Linux ends the child when the thread that started it ends, so the thread of the event loop must outlive this object.
    """

    def __init__(self, domain: str, section: EnvironmentConfig, start_seconds: float) -> None:
        """
        Args:
            section: the domain's block of the configuration.
            start_seconds: deadline for the child to start and to import its environment.
        """
        self._domain, self._section, self._start_seconds = domain, section, start_seconds
        self._bounds = TreeBounds(int(section.memory_gib * GIB), section.max_processes)
        self._held: _Held | None = None
        self._sessions: dict[int, _Held] = {}
        self._starting = asyncio.Lock()
        self._burying: set[asyncio.Task[None]] = set()
        self._closed = False
        self._number = 0

    async def start(self) -> EnvironmentReady:
        """Start the child, so that an environment that cannot be loaded is reported before training.

        Raises:
            ConfigError: the environment or a tool is not found or not valid, or the environment does not accept its
                arguments.
            EnvironmentProcessFailed: the child died or did not start in time.
        """
        return (await self._started()).ready

    async def open(self, session: int, row: Mapping[str, Any], seed: int) -> Observation:
        """Create an environment under a new session number, and reset it. If this fails, the environment is closed.

        Raises:
            EnvironmentFailed: the environment raised or exceeded its deadline, or its process was lost.
            ConfigError, EnvironmentProcessFailed: a lost child could not be replaced.
        """
        held = await self._started()
        self._sessions[session] = held
        held.sessions.add(session)
        try:
            return await _to_its_end(self._ask(held, session, "reset", (row, seed)))
        except BaseException:
            await self.end(session)
            raise

    async def step(self, session: int, message: Message) -> Step:
        """Take one step of a session.

        Raises:
            EnvironmentFailed: the environment raised or exceeded its deadline, or its process was lost.
        """
        if (held := self._sessions.get(session)) is None:
            raise NeighbourFailed("the worker that held the environment's process was replaced")
        return await _to_its_end(self._ask(held, session, "step", (message,)))

    async def end(self, session: int) -> None:
        """Close the environment of a session, if there is one. Errors are only logged."""
        if (held := self._sessions.pop(session, None)) is None:
            return
        held.sessions.discard(session)
        if held.lost:
            return
        try:
            await _to_its_end(self._ask(held, session, "close", ()))
        except EnvironmentFailed as failed:
            LOG.warning("environments.%s: %s", self._domain, failed)

    async def close(self) -> None:
        """Kill the child. Its sessions fail."""
        self._closed = True
        async with self._starting:
            if self._held is not None:
                self._lose(self._held, EnvironmentFailed("the process was closed"))
        if self._burying:
            await asyncio.wait(self._burying)

    async def _ask(self, held: _Held, session: int, method: Method, given: tuple[Any, ...]) -> Any:
        async with nullcontext() if held.ready.side_by_side else held.turn:
            if held.lost:
                raise NeighbourFailed(f"its process was ended because of another environment in it: {held.lost}")
            call = Call(self._number, new_seals(1)[0], session, method, given)
            self._number += 1
            pending = held.pending[call.number] = _Pending(call, asyncio.get_running_loop().create_future())
            seconds = self._section.step_timeout + (CANCEL_SECONDS if held.ready.side_by_side else 0.0)
            try:
                async with held.sending:
                    await held.child.send(call, seconds)
                await asyncio.wait([pending.done], timeout=seconds)
                if not pending.done.done():
                    await asyncio.wait([pending.done], timeout=GRACE_SECONDS)
                if not pending.done.done():
                    raise TimeoutError
            except TimeoutError:
                why = f"{method} did not end within step_timeout, {self._section.step_timeout:g} s"
                self._lose(held, EnvironmentFailed(why, "timed_out"), call.number)
            except ChildDied as died:
                self._lose(held, EnvironmentFailed(str(died)))
            finally:
                held.pending.pop(call.number, None)
            return await pending.done

    async def _read(self, held: _Held) -> None:
        """Read the replies of a child until it is lost."""
        try:
            while True:
                try:
                    messages = await held.child.receive(READ_SECONDS)
                except TimeoutError:
                    continue
                for message in messages:
                    _deliver(held, message)
        except ChildDied as died:
            self._lose(held, EnvironmentFailed(str(died)))
        except Garbled as garbled:
            self._lose(held, EnvironmentFailed(f"its process sent an invalid reply: {garbled}"))

    def _lose(self, held: _Held, failed: EnvironmentFailed, culprit: int | None = None) -> None:
        """End a child and fail its calls in progress.

        If `culprit` is the number of the call that caused the loss, the other calls fail with NeighbourFailed. If it is
        None, all fail with the same error.
        """
        if held.lost:
            return
        held.lost = failed.why
        held.child.end_process()
        if self._held is held:
            self._held = None
        burying = asyncio.create_task(_close_when_done(held))
        self._burying.add(burying)
        burying.add_done_callback(self._burying.discard)
        if not self._closed:
            LOG.warning(
                "environments.%s: a process with %d sessions is lost: %s", self._domain, len(held.sessions), failed.why
            )
        several = f" ({len(held.pending)} calls were in progress)" if culprit is None and len(held.pending) > 1 else ""
        for number, pending in held.pending.items():
            if pending.done.done():
                continue
            is_neighbour = culprit is not None and number != culprit
            error = (
                NeighbourFailed(f"its process was ended because of another environment in it: {failed.why}")
                if is_neighbour
                else failed
            )
            pending.done.set_exception(EnvironmentFailed(f"{failed.why}{several}", failed.reason) if several else error)

    async def _started(self) -> _Held:
        """Return the child, started if necessary."""
        async with self._starting:
            if self._closed:
                raise RollError("the environment process is closed")
            if self._held is not None and self._held.child.alive():
                return self._held
            if self._held is not None:
                self._lose(self._held, EnvironmentFailed(self._held.child.end_process()))
            held = _Held(Child(CHILD, self._section.system_envs))
            try:
                held.tasks.append(asyncio.create_task(held.child.watch(f"environments.{self._domain}", self._bounds)))
                await held.child.send(self._assignment(), self._start_seconds)
                message, *_ = await held.child.receive(self._start_seconds)
                held.ready = read_environment_ready(message)
                if held.ready.faults:
                    raise ConfigError(held.ready.faults)
            except BaseException as error:
                self._lose(held, EnvironmentFailed("its process did not start"))
                if isinstance(error, TimeoutError):
                    raise EnvironmentProcessFailed(
                        f"the environment process was not ready after {self._start_seconds:g} s"
                    ) from error
                if isinstance(error, ChildDied | Garbled):
                    raise EnvironmentProcessFailed(f"the environment process did not start: {error}") from error
                raise
            held.tasks.append(asyncio.create_task(self._read(held)))
            self._held = held
            return held

    def _assignment(self) -> EnvironmentAssignment:
        section = self._section
        name = environment_of(self._domain, section)
        servers = tuple(McpServer(one.command or (), one.url, one.call_timeout) for one in section.mcp)
        bounds = section.step_timeout, self._bounds.memory_bytes
        return EnvironmentAssignment(self._domain, name, section.environment_args, section.tools, servers, *bounds)


async def _close_when_done(held: _Held) -> None:
    """Close the socket of an ended child once all reads and writes have ended."""
    for task in held.tasks:
        task.cancel()
    if held.tasks:
        await asyncio.wait(held.tasks)
    async with held.sending:
        held.child.kill()


def _deliver(held: _Held, message: bytes) -> None:
    """Deliver the outcome of a call. Raises Garbled if no such call is in progress, or the reply is malformed."""
    reply = read_environment_reply(message)
    pending = held.pending.get(reply.number)
    if pending is None or pending.done.done() or pending.call.seal != reply.seal:
        raise Garbled("it does not carry the number of a call in progress")
    if reply.failed is not None:
        pending.done.set_exception(reply.failed)
    else:
        pending.done.set_result(returned_value(pending.call.method, reply.returned))


async def _to_its_end(call: Coroutine[Any, Any, R]) -> R:
    """Await a call, but let it continue if the caller is cancelled: the child still works on it, and the next call must
    wait.
    """
    task = asyncio.ensure_future(call)
    task.add_done_callback(
        lambda done: done.cancelled() or done.exception()
    )  # retrieve the exception: the caller may be gone
    return await asyncio.shield(task)
