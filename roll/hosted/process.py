"""Runs user code in a separate process that can be killed, so that it cannot hang, crash or block the run.

The child process (served.py) makes one call at a time, or several concurrently. It is killed if a call exceeds its
deadline and the child does not end it itself, if the child and its descendants exceed their limit of memory or
processes, or if it sends a message that does not answer a call in progress. A child that died or was killed is replaced
when there are further calls. What becomes of its unanswered calls is up to the kind of user code.

A child is a fresh interpreter, never a fork of this process, and imports only the modules that its user code needs.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from roll.errors import ConfigError, RollError
from roll.hosted.contained import CANCEL_SECONDS, Child, ChildDied
from roll.hosted.frames import Assignment, Garbled, Reply, new_seals, read_ready, read_reply
from roll.system.tree import TreeBounds

C = TypeVar("C")
T = TypeVar("T")


class HostedProcessFailed(RollError):
    """A process for user code did not start."""


@dataclass(frozen=True)
class Hosting:
    """How a child is started, and its bounds."""

    module: str
    """The module that the child runs."""
    kind: str
    """What its user code is, for messages: `reward` or `environment`."""
    place: str
    """Key path of its block in the configuration."""
    reply: str
    """What a reply is called in messages."""
    assignment: Assignment
    environment: Mapping[str, str]
    """Environment variables to add."""
    bounds: TreeBounds
    start_seconds: float
    """Deadline in seconds for the child to start and to import its user code."""


@dataclass(frozen=True)
class Loss:
    """Why a child was lost."""

    why: str
    is_late: bool = False
    """Whether the first call in progress exceeded its deadline."""
    disturbed: bool = False
    """Whether something outside roll killed or stopped the child."""


class HostedProcess(ABC, Generic[C, T]):
    """Makes calls, of type C, of the user code of one domain, with traits of type T. Must be used from a single asyncio
    event loop.

    Linux ends the child when the thread that started it ends, so the thread of the event loop must outlive this object.
    """

    def __init__(self, hosting: Hosting, read_traits: Callable[[Any], T], linger: float = 0.0) -> None:
        """
        Args:
            read_traits: decodes the traits that the child reports. Raises TypeError or ValueError if they are invalid.
            linger: seconds to wait for further replies after the first, so that they are processed together.
        """
        self._hosting, self._read_traits, self._linger = hosting, read_traits, linger
        self._child: Child | None = None
        self._watching: asyncio.Task[None] | None = None
        self._traits: T | None = None
        self._side_by_side = False
        self._turn = asyncio.Lock()
        self._closed = False
        self._serving: asyncio.Task[None] | None = None
        self._sent: dict[int, tuple[int, C]] = {}
        """Calls sent to the child and not yet answered, with their seals, by number, in the order in which they
        start.
        """
        self._begun: dict[int, float] = {}
        """Start times of the calls in progress, by number. They may be slightly late, never early."""
        self._number = 0

    @property
    @abstractmethod
    def _concurrency(self) -> int | None:
        """Largest number of calls in progress; None if it is unlimited."""

    @abstractmethod
    def _has_waiting(self) -> bool:
        """Whether calls wait to be sent."""

    @abstractmethod
    def _next_calls(self) -> Sequence[Any]:
        """Return the calls to send now, each after `_register`. A child that makes one call at a time reads no messages
        during a call.
        """

    @abstractmethod
    def _answered(self, call: C, reply: Reply) -> None:
        """Store the outcome of a call. Raises Garbled if the reply is malformed; the call is then still unanswered."""

    @abstractmethod
    def _lost(self, sent: Mapping[int, C], begun: Sequence[int], loss: Loss) -> None:
        """Settle the unanswered calls of a lost child, by number, of which those of the numbers `begun` were in
        progress.
        """

    @abstractmethod
    def _abandon(self, error: BaseException) -> None:
        """Let all calls fail that wait or were sent."""

    async def start(self) -> T:
        """Start the child, so that user code that cannot be loaded is reported before training. Return its traits.

        Raises:
            ConfigError: the user code is not found or not valid, or does not accept its arguments.
            HostedProcessFailed: the child died or did not start in time.
        """
        async with self._turn:
            await self._started()
            assert self._traits is not None, "a child that is ready has reported its traits"
            return self._traits

    async def close(self) -> None:
        """Kill the child. Calls in progress fail."""
        self._closed = True
        if self._child is not None:
            self._child.end_process()  # this also wakes the task that waits for its messages
        async with self._turn:
            self._end()

    def _check_open(self) -> None:
        if self._closed:
            raise RollError(f"the {self._hosting.kind} process is closed")

    def _serve_soon(self) -> None:
        """Let waiting calls be made."""
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        elif self._concurrency != 1 and self._child is not None:
            self._child.wake()

    async def _serve(self) -> None:
        """Make all waiting calls."""
        async with self._turn:
            try:
                while self._sent or self._has_waiting():
                    self._check_open()
                    await self._exchange()
            except BaseException as error:
                self._end()
                self._abandon(error)
                self._sent.clear()
                self._begun.clear()
                if not isinstance(error, Exception):
                    raise

    async def _exchange(self) -> None:
        """Send calls, and process at least one reply or the loss of the child."""
        if self._child is not None and not self._sent and not self._child.alive():
            self._lose(Loss(self._child.end_process()))
            return
        # A child that has died is replaced only after its unanswered calls are processed.
        child = self._child if self._sent and self._child else await self._started()
        seconds = self._hosting.assignment.timeout + (CANCEL_SECONDS if self._side_by_side else 0.0)
        loop = asyncio.get_running_loop()
        request = self._next_calls()
        self._begin(loop.time())
        if not self._sent:
            return
        try:
            if request:
                await child.send(request, seconds)
            left = next(iter(self._begun.values())) + seconds - loop.time()
            messages = await child.receive(left, self._linger if len(self._sent) > 1 else 0.0)
            now = loop.time()
            for message in messages:
                self._store(read_reply(message), now)
                if self._child is not child:
                    break
        except TimeoutError:
            self._lose(Loss("", is_late=True, disturbed=child.is_stopped()))
        except ChildDied as died:
            self._lose(Loss(str(died), disturbed=child.was_killed()))
        except Garbled as garbled:
            self._lose(Loss(f"its process sent an invalid {self._hosting.reply}: {garbled}"))

    def _register(self, call: C, count: int) -> tuple[int, tuple[int, ...]]:
        """Register `count` calls as sent. Return the number of the first and their seals."""
        first, seals = self._number, new_seals(count)
        self._number += count
        self._sent.update((first + index, (seal, call)) for index, seal in enumerate(seals))
        return first, seals

    def _begin(self, now: float) -> None:
        for number in islice(self._sent, self._concurrency):
            self._begun.setdefault(number, now)

    def _store(self, reply: Reply, now: float) -> None:
        """Store the outcome of a call. Raises Garbled if it is malformed, or does not belong to a call in progress."""
        number = reply.number
        if number not in self._begun:
            self._begin(now)
        if number not in self._begun or reply.seal != self._sent[number][0]:
            raise Garbled("it does not carry the number of a call in progress")
        self._answered(self._sent[number][1], reply)

    def _lose(self, loss: Loss) -> None:
        """End a lost child, and settle its calls."""
        self._check_open()
        self._end()
        self._begin(asyncio.get_running_loop().time())
        begun = list(self._begun)
        self._lost(self._take_back(), begun, loss)

    def _take_back(self) -> dict[int, C]:
        """Return the unanswered calls of an ended child by number, in order."""
        sent = {number: call for number, (_, call) in self._sent.items()}
        self._sent.clear()
        self._begun.clear()
        return sent

    async def _started(self) -> Child:
        """Return the child, started if necessary."""
        if self._child is not None and self._child.alive():
            return self._child
        self._end()
        hosting = self._hosting
        child = self._child = Child(hosting.module, hosting.environment)
        try:
            self._watching = asyncio.create_task(child.watch(hosting.place, hosting.bounds))
            await child.send(hosting.assignment, hosting.start_seconds)
            message, *_ = await child.receive(hosting.start_seconds)
            ready = read_ready(message, self._read_traits)
            if ready.faults:
                raise ConfigError(ready.faults)
        except BaseException as error:
            self._end()
            process = f"the {hosting.kind} process"
            if isinstance(error, TimeoutError):
                raise HostedProcessFailed(f"{process} was not ready after {hosting.start_seconds:g} s") from error
            if isinstance(error, ChildDied | Garbled):
                raise HostedProcessFailed(f"{process} did not start: {error}") from error
            raise
        self._traits, self._side_by_side = ready.traits, ready.side_by_side
        return child

    def _end(self) -> None:
        """End the child, if there is one, and close its socket. No task may be waiting for a message from it."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if self._child is not None:
            self._child.kill()
            self._child = None


def settle(done: asyncio.Future[Any], error: BaseException) -> None:
    """Make the waiting caller, if it still waits, raise an error."""
    if done.done():
        return
    if isinstance(error, asyncio.CancelledError):
        done.cancel()
    else:
        done.set_exception(error)
