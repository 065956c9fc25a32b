"""A reward function in a process that can be ended: it cannot hang, crash or block the run.

The child (child.py) scores one response at a time; groups that wait are sent to it together. A response that is not scored by its
deadline costs the child, which is killed and replaced; the group goes on with the next response. A child is a fresh interpreter, never a
fork of this process, and imports nothing but what its reward needs.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from roll.config.schema.roles import RewardConfig
from roll.errors import ConfigError, RollError
from roll.rewards.child import HEADER, encoded, result_of
from roll.system.orphans import is_alive
from roll.types import Prompt, RewardOutcome, RewardResult

RECEIVE_BYTES = 1 << 16
MOST_AHEAD = 32
"""Groups that are sent together: so that the child need not wait for this process, nor this process look at each result as it comes."""
LINGER = 0.005
"""Seconds that a result waits for others, where others are expected."""
LOOK_SECONDS = 0.01
"""Between two looks for processes that were killed and may not be gone yet."""
KILL_SECONDS = 10.0
"""A killed process is gone at once, unless the kernel itself is stuck."""


class RewardProcessFailed(RollError):
    """The process of a reward did not start."""


class ChildDied(Exception):
    """The child closed its end; `str()` says how it ended."""


@dataclass(eq=False)
class _Group:
    """Responses to score."""

    prompt: Prompt
    responses: Sequence[str]
    done: asyncio.Future[None]
    """Cancelled with the call that waits for it."""
    results: list[RewardResult] = field(default_factory=list)

    @property
    def left(self) -> Sequence[str]:
        return self.responses[len(self.results) :]


class RewardProcess:
    """Scores the responses of one domain. For use from one asyncio event loop.

    Linux ends the child when the thread that started it ends, so the loop's thread must outlive this.
    """

    def __init__(self, domain: str, reward: RewardConfig, start_seconds: float) -> None:
        """
        Args:
            reward: the section of the domain.
            start_seconds: in which the child must have started and imported its reward.
        """
        self._domain, self._reward, self._start_seconds = domain, reward, start_seconds
        self._child: _Child | None = None
        self._turn = asyncio.Lock()
        self._closed = False
        self._waiting: deque[_Group] = deque()
        self._current: _Group | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the child, so that a reward that cannot be loaded is known before training.

        Raises:
            ConfigError: the reward is not found or does not take its `reward_args`.
            RewardProcessFailed: the child died or was late.
        """
        async with self._turn:
            await self._ready()

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        """One result for each response, in order. Groups take turns.

        The deadline, `timeout` of the section, holds for each response by itself. A result whose outcome is not SCORED has
        the section's `failed_value`.

        Raises:
            RewardProcessFailed: a child could not be replaced.
            RollError: this is closed.
        """
        self._check_open()
        group = _Group(prompt, responses, asyncio.get_running_loop().create_future())
        self._waiting.append(group)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        try:
            await group.done
        except asyncio.CancelledError:
            if self._current is group and self._child is not None:
                self._child.end_process()  # What it would still send belongs to nobody.
            raise
        failed = self._reward.failed_value
        return [result if result.outcome == RewardOutcome.SCORED else replace(result, value=failed) for result in group.results]

    async def _serve(self) -> None:
        """Score all groups that wait, some at a time."""
        while self._waiting:
            groups = [self._waiting.popleft() for _ in range(min(MOST_AHEAD, len(self._waiting)))]
            async with self._turn:
                try:
                    while groups := [group for group in groups if not group.done.done()]:
                        self._check_open()
                        await self._some(groups)
                except BaseException as error:
                    self._end()
                    for group in groups:
                        _fail(group.done, error)
                    if not isinstance(error, Exception):
                        raise

    async def close(self) -> None:
        """End the child, whatever it is doing. Calls of `score` that are under way raise RollError."""
        self._closed = True
        if self._child is not None:
            self._child.end_process()  # Whoever waits for it hears of its end.
        async with self._turn:
            self._end()

    def _check_open(self) -> None:
        if self._closed:
            raise RollError("the reward process is closed")

    async def _some(self, groups: Sequence[_Group]) -> None:
        """At least one result: all of them, or those up to and with the one that cost the child."""
        child, seconds = await self._ready(), self._reward.timeout
        self._current = groups[0]
        expected = sum(len(group.left) for group in groups)
        try:
            await child.send([(group.prompt, list(group.left)) for group in groups], seconds)
            for self._current in groups:
                for _ in self._current.left:
                    expected -= 1
                    self._current.results.append(result_of(await child.receive(seconds, LINGER if expected else 0.0)))
                self._settle(self._current)
        except TimeoutError:
            self._end()
            self._record(self._current, RewardOutcome.TIMED_OUT, f"no verdict after {seconds:g} s")
        except ChildDied as died:
            self._end()
            self._record(self._current, RewardOutcome.CRASHED, str(died))
        finally:
            self._current = None

    def _record(self, group: _Group, outcome: RewardOutcome, note: str) -> None:
        """What became of the response that cost the child."""
        group.results.append(RewardResult(0.0, outcome, note=note))
        if not group.left:
            self._settle(group)

    def _settle(self, group: _Group) -> None:
        self._check_open()
        if not group.done.done():
            group.done.set_result(None)

    async def _ready(self) -> _Child:
        """The child, started if there is none."""
        if self._child is not None and self._child.alive():
            return self._child
        self._end()
        self._child = _Child(self._reward.system_envs)
        try:
            await self._child.send((self._domain, self._reward.reward or self._domain, self._reward.reward_args), self._start_seconds)
            faults = await self._child.receive(self._start_seconds)
        except BaseException as error:
            self._end()
            if isinstance(error, TimeoutError):
                raise RewardProcessFailed(f"the reward's process was not ready after {self._start_seconds:g} s") from error
            if isinstance(error, ChildDied):
                raise RewardProcessFailed(f"the reward's process did not start: {error}") from error
            raise
        if faults:
            self._end()
            raise ConfigError(faults)
        return self._child

    def _end(self) -> None:
        """End the child, if there is one, and close the socket to it; nobody may be waiting for it."""
        if self._child is not None:
            self._child.kill()
            self._child = None


def _fail(done: asyncio.Future[None], error: BaseException) -> None:
    """Whoever waits raises it."""
    if done.done():
        return
    if isinstance(error, asyncio.CancelledError):
        done.cancel()
    else:
        done.set_exception(error)


def _end_groups_beneath(pid: int) -> None:
    """Kills what a process started in groups and sessions apart from its own; it is stopped meanwhile, and starts nothing more."""
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
    """The process groups of those that live."""
    found: set[int] = set()
    for process in filter(is_alive, processes):
        with suppress(ProcessLookupError):
            found.add(os.getpgid(process.pid))
    return found


class _Child:
    """One process and the socket to it. The process leads a session of its own: what it started ends with it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._received = bytearray()
        self._ended = False
        # -P: the parent's sys.path, handed over as PYTHONPATH, says where modules are; not the working directory.
        command = [sys.executable, "-P", "-m", "roll.rewards.child", str(theirs.fileno()), str(os.getpid())]
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # One thread each unless told otherwise: BLAS would start one for every core as soon as numpy is imported.
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
        # Not reaped here: as long as it is not, no other process can take its id, and its session can be ended by it.
        if self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    async def send(self, message: Any, timeout: float) -> None:
        """Raises TimeoutError, or ChildDied."""
        try:
            await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(self._socket, encoded(message)), timeout)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise ChildDied(self.end_process()) from error

    async def receive(self, timeout: float, linger: float = 0.0) -> Any:
        """The next message. Raises TimeoutError if it has not come in `timeout` seconds, or ChildDied.

        If it is not there yet, it is left for `linger` seconds more once it has come: others may be there by then.

        What lies in the socket counts as come, however late this process gets to look at it.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            if (message := self._next()) is not None:
                return message[0]
            remaining = deadline - loop.time()
            self._drain()
            if (message := self._next()) is not None:
                return message[0]
            if self._ended:
                raise ChildDied(self.end_process())
            if remaining <= 0:
                raise TimeoutError
            if await self._readable(remaining) and linger:
                await asyncio.sleep(linger)

    def kill(self) -> None:
        """Ends the process and all that it started, and closes the socket."""
        self.end_process()
        self._socket.close()

    def end_process(self) -> str:
        """Kills and reaps the process and what it started; says how it ended."""
        if self._process.returncode is None:
            _end_groups_beneath(self._process.pid)
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait(KILL_SECONDS)
        return f"the process died of {signal.Signals(-status).name}" if status < 0 else f"the process ended itself with status {status}"

    def _drain(self) -> None:
        try:
            while chunk := self._socket.recv(RECEIVE_BYTES):
                self._received += chunk
        except BlockingIOError:
            return
        except ConnectionError:
            pass  # The child ended before it read all that was sent.
        self._ended = True

    def _next(self) -> tuple[Any] | None:
        """The first whole message received, in a tuple."""
        if len(self._received) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        message = pickle.loads(self._received[HEADER.size : end])
        del self._received[:end]
        return (message,)

    async def _readable(self, seconds: float) -> bool:
        """Whether something has come in so many seconds."""
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        loop.add_reader(self._socket, lambda: ready.done() or ready.set_result(None))
        try:
            return bool((await asyncio.wait({ready}, timeout=seconds))[0])
        finally:
            loop.remove_reader(self._socket)
