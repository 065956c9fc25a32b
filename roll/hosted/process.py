"""Runs user code in a separate process that can be killed, so that it cannot hang, crash or block the run.

The child process (protocol.py) makes one call at a time, or several concurrently. It is killed if a call exceeds its
deadline and the child does not end it itself, if the child and its descendants exceed their limit of memory or
processes, or if it sends a message that does not answer a call in progress. A child that died or was killed is replaced
when there are further calls. The subclass decides whether its unanswered calls fail or are repeated.

A child is a fresh interpreter, never a fork of this process, and imports only the modules that its user code needs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import psutil

from roll.errors import ConfigError, RollError
from roll.hosted.protocol import (
    HEADER,
    MOST_BYTES,
    Assignment,
    Garbled,
    Reply,
    framed_pickle,
    new_seals,
    read_ready,
    read_reply,
)
from roll.system.orphans import is_alive, is_stopped
from roll.system.tree import LOOK_EVERY, STOPPED_LOOKS, TreeBounds, tree

C = TypeVar("C")
T = TypeVar("T")
LOG = logging.getLogger(__name__)
CANCEL_SECONDS = 5.0
"""Seconds after a call's deadline in which a child may end it. If it does not, its event loop is blocked."""
RECEIVE_BYTES = 1 << 16
LOOK_SECONDS = 0.01
"""Seconds between two checks of whether processes have exited."""
EXIT_LOOKS = 100
"""Largest number of checks of whether a process that closed its socket has exited. After the last one it is killed."""
KILL_SECONDS = 10.0
"""Deadline in seconds for the exit of a killed process. It exits at once unless the kernel itself is stuck."""


class ChildDied(Exception):
    """The child closed its end of the socket. `str()` returns how the process ended."""


class Child:
    """A child process and its socket. It leads its own session; its child processes are killed with it."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        """Run `python -m module DESCRIPTOR PARENT`, with `environment` added to that of this process."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._received = bytearray()
        self._ended = False
        self._cause = ""
        self._was_ended_here = self._was_stopped = False
        self._woken = False
        self._ready: asyncio.Future[None] | None = None
        # -P: modules are found by the parent's sys.path, which is passed as PYTHONPATH, and not in the working
        # directory.
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())]
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # One thread by default, because BLAS would start a thread for every core as soon as numpy is imported.
        inherited = {"OMP_NUM_THREADS": "1", **os.environ}
        try:
            self._process = subprocess.Popen(
                command,
                env={**inherited, "PYTHONPATH": paths, **environment},
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def alive(self) -> bool:
        # The process is not reaped here. Until it is, no other process can get its id, so the id can be used to end its
        # session.
        if self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def is_stopped(self) -> bool:
        """Return whether the process was stopped by SIGSTOP."""
        return self._process.returncode is None and is_stopped(self._process.pid)

    def was_killed(self) -> bool:
        """Return whether a SIGKILL that this object did not send, or a SIGSTOP, ended the process."""
        return self._was_stopped or (self._process.returncode == -signal.SIGKILL and not self._was_ended_here)

    async def send(self, message: Any, timeout: float) -> None:
        """Send a message. Raise TimeoutError after `timeout` seconds, or ChildDied."""
        try:
            await asyncio.wait_for(
                asyncio.get_running_loop().sock_sendall(self._socket, framed_pickle(message)), timeout
            )
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise await self._died() from error

    async def receive(self, timeout: float, linger: float = 0.0) -> list[bytes]:
        """Wait for messages and return all that have arrived, in order. Return an empty list if `wake` is called.

        If the call has to wait for the first message, it waits another `linger` seconds, so that others may arrive.
        Messages that reached the socket within the timeout are returned even if this process reads the socket late.

        Raises:
            TimeoutError: no message arrived within `timeout` seconds.
            ChildDied: the child closed its end of the socket.
            Garbled: a message is too large.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            remaining = deadline - loop.time()
            self._drain()
            if messages := self._messages():
                return messages
            if self._ended:
                raise await self._died()
            if self._woken:
                self._woken = False
                return []
            if remaining <= 0:
                raise TimeoutError
            if await self._readable(remaining) and linger:
                await asyncio.sleep(linger)

    def wake(self) -> None:
        """Make the current or the next call of `receive` return."""
        self._woken = True
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def kill(self) -> None:
        """Kill the process and its child processes, and close the socket."""
        self.end_process()
        self._socket.close()

    async def watch(self, name: str, bounds: TreeBounds) -> None:
        """Kill the process if it exceeds a bound or stays stopped, logged under `name`. `receive` then raises ChildDied
        with it.
        """
        stopped = 0
        while self.alive():
            stopped = stopped + 1 if self.is_stopped() else 0
            if stopped == STOPPED_LOOKS:
                self._was_stopped, self._cause = True, "the process was stopped (SIGSTOP)"
            if why := self.end_beyond(bounds):
                LOG.warning("%s: %s", name, why)
            await asyncio.sleep(LOOK_EVERY)

    def end_beyond(self, bounds: TreeBounds) -> str:
        """Kill the process and return the reason if its tree exceeds a bound. Otherwise return ""."""
        if why := bounds.exceeded(tree(self._process.pid)):
            self._cause = why
        return self.end_process() if self._cause else ""

    def end_process(self) -> str:
        """Kill the process and its children, and reap it. Return the bound that it exceeded, or how it ended."""
        if self._process.returncode is None:
            self._was_ended_here = self.alive()
            _end_groups_beneath(self._process.pid)
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait(KILL_SECONDS)
        if self._cause:
            return self._cause
        return (
            f"the process died of {signal.Signals(-status).name}"
            if status < 0
            else f"the process ended itself with status {status}"
        )

    async def _died(self) -> ChildDied:
        """Return the error after the child closed its end of the socket.

        Wait for the exit of the process first, because the kernel closes the socket of a killed process slightly before
        it exits.
        """
        for _ in range(EXIT_LOOKS):
            if not self.alive():
                break
            await asyncio.sleep(LOOK_SECONDS)
        return ChildDied(self.end_process())

    def _drain(self) -> None:
        try:
            while chunk := self._socket.recv(RECEIVE_BYTES):
                self._received += chunk
                if len(self._received) > MOST_BYTES:  # enough for at least one message
                    return
        except BlockingIOError:
            return
        except ConnectionError:
            pass  # the child ended before it had read everything
        self._ended = True

    def _messages(self) -> list[bytes]:
        """Return all complete messages that have arrived."""
        messages, begin = [], 0
        with memoryview(self._received) as received:
            while begin + HEADER.size <= len(received):
                size = HEADER.unpack_from(received, begin)[0]
                if size > MOST_BYTES:
                    if messages:  # return these first; the next call raises
                        break
                    raise Garbled(f"a message of {size} bytes, but at most {MOST_BYTES} are allowed")
                end = begin + HEADER.size + size
                if end > len(received):
                    break
                messages.append(bytes(received[begin + HEADER.size : end]))
                begin = end
        del self._received[:begin]
        return messages

    async def _readable(self, seconds: float) -> bool:
        """Wait until the socket is readable or `wake` is called. Return False if neither happened within `seconds`."""
        loop = asyncio.get_running_loop()
        ready = self._ready = loop.create_future()
        loop.add_reader(self._socket, lambda: ready.done() or ready.set_result(None))
        try:
            return bool((await asyncio.wait({ready}, timeout=seconds))[0])
        finally:
            loop.remove_reader(self._socket)


def _end_groups_beneath(pid: int) -> None:
    """Kill a process's descendants in other groups and sessions. Stop it first: it must not start more."""
    deadline = time.monotonic() + KILL_SECONDS
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        process.suspend()
        while (apart := _groups(process.children(recursive=True)) - {pid}) and time.monotonic() < deadline:
            for group in apart:
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            time.sleep(LOOK_SECONDS)


def _groups(processes: Sequence[psutil.Process]) -> set[int]:
    """Return the ids of the process groups of those processes that are alive."""
    found: set[int] = set()
    for process in filter(is_alive, processes):
        with suppress(ProcessLookupError):
            found.add(os.getpgid(process.pid))
    return found


class HostedProcessFailed(RollError):
    """A process for user code did not start."""


@dataclass(frozen=True)
class Hosting:
    """How a child is started, and its bounds."""

    module: str
    kind: str
    """What its user code is, for messages: `reward` or `environment`."""
    place: str
    """Key path of its block in the configuration."""
    reply: str
    """What a reply is called in messages."""
    assignment: Assignment
    environment: Mapping[str, str]
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
        """Calls sent to the child and not yet answered, with their seals, by number, in starting order."""
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
        """Return the calls to send now, each after `_register`. A child of one call at a time reads none during it."""

    @abstractmethod
    def _answered(self, call: C, reply: Reply) -> None:
        """Store the outcome of a call. Raises Garbled if the reply is malformed; the call is then still unanswered."""

    @abstractmethod
    def _lost(self, sent: Mapping[int, C], begun: Sequence[int], loss: Loss) -> None:
        """Settle a lost child's unanswered calls, by number, of which the numbers `begun` were in progress."""

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
        self._lost(self._withdraw_calls(), begun, loss)

    def _withdraw_calls(self) -> dict[int, C]:
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
                raise ConfigError(*ready.faults)
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
