"""Reward functions in processes that can be ended: none of them hangs, crashes or blocks the run.

Each of the pool's slots holds one child process (child.py) that scores one group at a time. A response that is not
scored by its deadline costs its child, which is killed and replaced; the group goes on with the next response.
Children are fresh interpreters, never forks of this process, and import nothing but what their rewards need.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from roll.config.schema_roles import Reward
from roll.errors import ConfigError, Fault, RollError, WorkerFailed
from roll.registry import nearest
from roll.rewards.child import HEADER, encoded
from roll.types import Prompt, RewardOutcome, RewardResult

RECEIVE_BYTES = 1 << 16
RewardTable = Mapping[str, tuple[str, Mapping[str, Any]]]
"""domain -> (name of the reward, reward_args)"""
KILL_SECONDS = 10.0
"""A killed process is gone at once, unless the kernel itself is stuck."""


class ChildDied(Exception):
    """The child closed its end; `str()` says how it ended."""


class RewardPool:
    """Scores the responses of several domains with `workers` processes. For use from one asyncio event loop.

    Linux ends children when the thread that started them ends, so the loop's thread must outlive the pool.
    """

    def __init__(self, rewards: Mapping[str, Reward], workers: int, start_timeout: float = 120.0) -> None:
        """
        Args:
            rewards: the sections of the domains to score.
            start_timeout: seconds that a child may take to start and import its rewards.

        Raises:
            ConfigError: two domains want different values of one environment variable.
        """
        self._rewards = dict(rewards)
        environment = _environment(rewards)
        table = {domain: (section.reward or domain, section.reward_args) for domain, section in rewards.items()}
        self._slots = [_Slot(rank, table, environment, start_timeout) for rank in range(workers)]
        self._idle: asyncio.Queue[_Slot] = asyncio.Queue()
        for slot in self._slots:
            self._idle.put_nowait(slot)
        self._closed = False

    async def start(self) -> None:
        """Starts all children, so that a reward that cannot be loaded is known before training.

        Raises:
            ConfigError: a reward is not found or does not take its `reward_args`.
            WorkerFailed: a child died or was late.
        """
        slots = [await self._idle.get() for _ in self._slots]
        try:
            started = await asyncio.gather(*(slot.ready() for slot in slots), return_exceptions=True)
        finally:
            for slot in slots:
                self._idle.put_nowait(slot)
        failures = [outcome for outcome in started if isinstance(outcome, BaseException)]
        if failures:
            await self.close()
            raise failures[0]

    async def score(self, domain: str, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        """One result for each response, in order. Groups beyond the number of workers wait for a free one.

        The deadline, `timeout` of the domain's section, holds for each response by itself. A result whose outcome is not
        SCORED has the section's `failed_value`.

        Raises:
            ValueError: the pool has no such domain.
            WorkerFailed: a child could not be replaced.
            RollError: the pool is closed.
        """
        if domain not in self._rewards:
            raise ValueError(f"no reward domain is named '{domain}'{nearest(domain, self._rewards)}")
        section = self._rewards[domain]
        slot = await self._idle.get()
        if self._closed:
            self._idle.put_nowait(slot)
            raise RollError("the reward pool is closed")
        results: list[RewardResult] = []
        try:
            while len(results) < len(responses):
                results += await slot.score(domain, prompt, responses[len(results) :], section.timeout)
                if self._closed:
                    raise RollError("the reward pool was closed before all responses were scored")
        except BaseException:
            # Cancelled or failed midway: what the child still sends belongs to nobody.
            slot.end()
            raise
        finally:
            self._idle.put_nowait(slot)
        return [result if result.outcome == RewardOutcome.SCORED else replace(result, value=section.failed_value) for result in results]

    async def close(self) -> None:
        """Ends all children, whatever they are doing. Calls of `score` that are under way raise RollError."""
        self._closed = True
        for slot in self._slots:
            slot.interrupt()
        slots = [await self._idle.get() for _ in self._slots]
        for slot in slots:
            slot.end()
            self._idle.put_nowait(slot)

    async def __aenter__(self) -> RewardPool:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class _Slot:
    """The place of one child, which may be replaced."""

    def __init__(self, rank: int, table: RewardTable, environment: Mapping[str, str], timeout: float) -> None:
        self._rank, self._table, self._environment, self._timeout = rank, table, environment, timeout
        self._child: _Child | None = None

    async def ready(self) -> _Child:
        """The slot's child, started if there is none."""
        if self._child is not None and self._child.alive():
            return self._child
        self.end()
        self._child = _Child(self._environment)
        try:
            await self._child.send(self._table, self._timeout)
            faults = await self._child.receive(self._timeout)
        except TimeoutError as error:
            self.end()
            raise WorkerFailed("rewards", self._rank, f"a reward process was not ready after {self._timeout:g} s") from error
        except ChildDied as error:
            self.end()
            raise WorkerFailed("rewards", self._rank, f"a reward process did not start: {error}") from error
        if faults:
            self.end()
            raise ConfigError(faults)
        return self._child

    async def score(self, domain: str, prompt: Prompt, responses: Sequence[str], timeout: float) -> list[RewardResult]:
        """At least one result: all of them, or those up to and with the one that cost the child."""
        child = await self.ready()
        results: list[RewardResult] = []
        try:
            await child.send((domain, prompt, list(responses)), timeout)
            for _ in responses:
                results.append(await child.receive(timeout))
        except TimeoutError:
            self.end()
            results.append(RewardResult(0.0, RewardOutcome.TIMED_OUT, note=f"no verdict after {timeout:g} s"))
        except ChildDied as died:
            self.end()
            results.append(RewardResult(0.0, RewardOutcome.CRASHED, note=str(died)))
        return results

    def interrupt(self) -> None:
        """Ends the child's process, so that whoever waits for it hears of its end."""
        if self._child is not None:
            self._child.end_process()

    def end(self) -> None:
        """Ends the child, if there is one, and closes the socket to it; nobody may be waiting for it."""
        if self._child is not None:
            self._child.kill()
            self._child = None


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

    async def receive(self, timeout: float) -> Any:
        """The next message. Raises TimeoutError if it has not come in `timeout` seconds, or ChildDied.

        What lies in the socket counts as come, however late this process gets to look at it.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            remaining = deadline - loop.time()
            self._drain()
            if (message := self._next()) is not None:
                return message[0]
            if self._ended:
                raise ChildDied(self.end_process())
            if remaining <= 0:
                raise TimeoutError
            await self._readable(remaining)

    def kill(self) -> None:
        """Ends the process and all that it started, and closes the socket."""
        self.end_process()
        self._socket.close()

    def end_process(self) -> str:
        """Kills and reaps the process and what it started; says how it ended."""
        if self._process.returncode is None:
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

    async def _readable(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        loop.add_reader(self._socket, lambda: ready.done() or ready.set_result(None))
        try:
            await asyncio.wait({ready}, timeout=seconds)
        finally:
            loop.remove_reader(self._socket)


def _environment(rewards: Mapping[str, Reward]) -> dict[str, str]:
    """The `system_envs` of all domains, which share their processes."""
    merged: dict[str, str] = {}
    faults: list[Fault] = []
    for domain, section in rewards.items():
        for name, value in section.system_envs.items():
            if merged.setdefault(name, value) != value:
                problem = f"is '{value}', but another domain of the same processes sets it to '{merged[name]}'"
                faults.append(Fault(f"rewards.{domain}.system_envs.{name}", problem, "give both the same value"))
    if faults:
        raise ConfigError(faults)
    return merged
