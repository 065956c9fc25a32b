"""The parent's side of a child process that runs the user's code, and of the socket to it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from roll.system.frames import HEADER, MOST_BYTES, Garbled, encoded
from roll.system.orphans import is_alive
from roll.system.tree import LOOK_EVERY, TreeBounds, tree

LOG = logging.getLogger(__name__)
CANCEL_SECONDS = 5.0
"""Seconds beyond the deadline that a child has to end a call itself. After that its event loop is blocked."""
RECEIVE_BYTES = 1 << 16
LOOK_SECONDS = 0.01
"""Seconds between two checks whether killed processes are gone."""
EXIT_LOOKS = 100
"""Number of checks whether a process that has closed its socket has exited. Afterwards it is killed."""
KILL_SECONDS = 10.0
"""Seconds. A killed process is gone at once, unless the kernel itself is stuck."""


class ChildDied(Exception):
    """The child closed its end; `str()` says how it ended."""


class Child:
    """One process and the socket to it. The process leads its own session, and its child processes end with it."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        """Run `module` as `python -m module DESCRIPTOR PARENT`."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._received = bytearray()
        self._ended = False
        self._cause = ""
        self._was_ended_here = False
        self._woken = False
        self._ready: asyncio.Future[None] | None = None
        # -P: modules are found by the parent's sys.path, passed as PYTHONPATH, and not in the working directory.
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())]
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # One thread by default: BLAS would start one for every core as soon as numpy is imported.
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
        # Not reaped here: until then no other process can take its id, and the id can be used to end its session.
        if self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def is_stopped(self) -> bool:
        """Whether the process was stopped by SIGSTOP."""
        with suppress(psutil.NoSuchProcess):
            return self._process.returncode is None and psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
        return False

    def was_killed(self) -> bool:
        """Whether the process ended by a SIGKILL from elsewhere."""
        return self._process.returncode == -signal.SIGKILL and not self._was_ended_here

    async def send(self, message: Any, timeout: float) -> None:
        """Send bytes. Raises TimeoutError, or ChildDied."""
        try:
            await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(self._socket, encoded(message)), timeout)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise await self._died() from error

    async def receive(self, timeout: float, linger: float = 0.0) -> list[bytes]:
        """Return the unread messages in order: at least one, unless `wake` is called.

        If none has arrived yet, wait for `linger` seconds after the first one, so that others may arrive.

        Messages in the socket count as arrived, however late this process reads it.

        Raises:
            TimeoutError: none arrived within `timeout` seconds.
            ChildDied: the child closed its end, so none will arrive.
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
        """Wake the present or the next waiter for a message."""
        self._woken = True
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def kill(self) -> None:
        """End the process and its child processes, and close the socket."""
        self.end_process()
        self._socket.close()

    async def watch(self, name: str, bounds: TreeBounds) -> None:
        """End the process once it exceeds its memory bound. The receiver of its messages gets the error. `name` is for the log."""
        while self.alive():
            if why := self.end_beyond(bounds):
                LOG.warning("%s: %s", name, why)
            await asyncio.sleep(LOOK_EVERY)

    def end_beyond(self, bounds: TreeBounds) -> str:
        """End the process and return the reason if it and its child processes exceed a bound. Otherwise return an empty text."""
        if why := bounds.exceeded(tree(self._process.pid)):
            self._cause = why
        return self.end_process() if self._cause else ""

    def end_process(self) -> str:
        """Kill and reap the process and its child processes. Return how it ended."""
        if self._process.returncode is None:
            self._was_ended_here = self.alive()
            _end_groups_beneath(self._process.pid)
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait(KILL_SECONDS)
        if self._cause:
            return self._cause
        return f"the process died of {signal.Signals(-status).name}" if status < 0 else f"the process ended itself with status {status}"

    async def _died(self) -> ChildDied:
        """Return the error after the child closed its end of the socket. The kernel closes it a moment before a killed process is gone."""
        for _ in range(EXIT_LOOKS):
            if not self.alive():
                break
            await asyncio.sleep(LOOK_SECONDS)
        return ChildDied(self.end_process())

    def _drain(self) -> None:
        try:
            while chunk := self._socket.recv(RECEIVE_BYTES):
                self._received += chunk
                if len(self._received) > MOST_BYTES:  # one message at least
                    return
        except BlockingIOError:
            return
        except ConnectionError:
            pass  # The child ended before it read all that was sent.
        self._ended = True

    def _messages(self) -> list[bytes]:
        """Return all complete messages that have arrived."""
        messages, begin = [], 0
        with memoryview(self._received) as received:
            while begin + HEADER.size <= len(received):
                size = HEADER.unpack_from(received, begin)[0]
                if size > MOST_BYTES:
                    if messages:  # are taken first
                        break
                    raise Garbled(f"a message of {size} bytes; {MOST_BYTES} are the most")
                end = begin + HEADER.size + size
                if end > len(received):
                    break
                messages.append(bytes(received[begin + HEADER.size : end]))
                begin = end
        del self._received[:begin]
        return messages

    async def _readable(self, seconds: float) -> bool:
        """Whether a message or a call of `wake` arrived within so many seconds."""
        loop = asyncio.get_running_loop()
        ready = self._ready = loop.create_future()
        loop.add_reader(self._socket, lambda: ready.done() or ready.set_result(None))
        try:
            return bool((await asyncio.wait({ready}, timeout=seconds))[0])
        finally:
            loop.remove_reader(self._socket)


def _end_groups_beneath(pid: int) -> None:
    """Kill a process's children in other groups and sessions. The process is stopped meanwhile, so that it starts no more."""
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
    """Return the process groups of living processes."""
    found: set[int] = set()
    for process in filter(is_alive, processes):
        with suppress(ProcessLookupError):
            found.add(os.getpgid(process.pid))
    return found
