"""The parent's side of a child process that runs user code, and of the socket to it."""

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

from roll.hosted.frames import HEADER, MOST_BYTES, Garbled, framed_pickle
from roll.system.orphans import is_alive
from roll.system.tree import LOOK_EVERY, TreeBounds, tree

LOG = logging.getLogger(__name__)
CANCEL_SECONDS = 5.0
"""Time in seconds after a call's deadline in which a child may end the call itself. If it does not, its event loop is
blocked.
"""
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
    """A child process and the socket to it. The process leads its own session, and its child processes are killed with
    it.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        """Run `module` as `python -m module DESCRIPTOR PARENT`. `environment` is added to the environment of this
        process.
        """
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._received = bytearray()
        self._ended = False
        self._cause = ""
        self._was_ended_here = False
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
        with suppress(psutil.NoSuchProcess):
            return (
                self._process.returncode is None and psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
            )
        return False

    def was_killed(self) -> bool:
        """Return whether the process was killed by a SIGKILL that this object did not send."""
        return self._process.returncode == -signal.SIGKILL and not self._was_ended_here

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
        """Kill the process if it exceeds a bound, and log that under `name`. `receive` then raises ChildDied with the
        reason.
        """
        while self.alive():
            if why := self.end_beyond(bounds):
                LOG.warning("%s: %s", name, why)
            await asyncio.sleep(LOOK_EVERY)

    def end_beyond(self, bounds: TreeBounds) -> str:
        """Kill the process and return the reason if it exceeds a bound together with its child processes. Otherwise
        return "".
        """
        if why := bounds.exceeded(tree(self._process.pid)):
            self._cause = why
        return self.end_process() if self._cause else ""

    def end_process(self) -> str:
        """Kill the process and its child processes, and reap it. Return the bound that it exceeded, or else how it
        ended.
        """
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
    """Kill the descendants of a process in other groups and sessions. Stop the process first, so that it cannot start
    more.
    """
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
