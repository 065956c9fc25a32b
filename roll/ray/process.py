"""The Ray actors that host a role's strategy: each is one process, which builds the strategy and runs the calls of its facade."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray.util
from ray import cloudpickle

from roll.backend import Rank
from roll.backend_settings import Settings
from roll.config.derived.devices import visible_devices
from roll.errors import EngineShortage, RollError, WorkerFailed
from roll.ray.batching import Answers, BatchedServer, portable
from roll.ray.engine_log import root_cause
from roll.ray.memory_monitor import MemoryMonitor, device_name
from roll.ray.shortage import engine_shortage
from roll.system.signs import enter
from roll.system.step_memory import collect_rarely

MOST_CALLS = 1 << 20
"""Largest number of concurrent calls in a process. There are never as many requests, so a pause or weight sync never waits for one."""

IMPORTING = "loading libraries"
"""Stage that is shown until the strategy enters its first stage."""


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class Process:
    """Hosts a strategy with blocking methods. Calls run one after another."""

    def __init__(self, log_file: str, devices: Sequence[int]) -> None:
        self._log = Path(log_file)
        _own_log(self._log)
        _see(devices)
        _find_programs()
        _use_own_temporary()
        enter("process started")

    def free_address(self) -> tuple[str, int]:
        """Return this host's address and a free port for the role's rendezvous."""
        return _free_address()

    def pid(self) -> int:
        """Return the process id, which the driver needs in order to end the process."""
        return os.getpid()

    def peak_bytes(self) -> int | None:
        """See `MemoryMonitor`."""
        return self._monitor.peak()

    def held_bytes(self) -> int | None:
        """See `MemoryMonitor`."""
        return self._monitor.held()

    def build(self, settings: Settings[Any], rank: Rank) -> str | None:
        """Build the strategy. Return the name of its device; see `device_name`."""
        self._monitor = MemoryMonitor(rank.device)
        enter(IMPORTING)
        with _portable_errors():
            self._rank, self._hosted = rank, [settings.build(rank)]
        return device_name()

    def add(self, make: Callable[[Any, Rank], Any]) -> int:
        """Build an additional object from the strategy. Return its place, which `call` expects."""
        with _portable_errors():
            self._hosted.append(make(self._hosted[0], self._rank))
        return len(self._hosted) - 1

    def call(self, place: int, method: str, *arguments: Any) -> Any:
        """Run a method of the strategy (place 0) or of an object that `add` built."""
        with _portable_errors():
            return getattr(self._hosted[place], method)(*arguments)

    def close(self) -> None:
        """Close the objects that `add` built, then the strategy."""
        with _portable_errors():
            for hosted in reversed(self._hosted):
                hosted.close()


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=MOST_CALLS)  # pyright: ignore[reportCallIssue]
class AsyncProcess:
    """Hosts a strategy whose methods are coroutines. Calls run concurrently."""

    def __init__(self, log_file: str, devices: Sequence[int]) -> None:
        self._log = Path(log_file)
        _own_log(self._log)
        _see(devices)
        _find_programs()
        _use_own_temporary()
        enter("process started")

    async def free_address(self) -> tuple[str, int]:
        """See `Process`."""
        return _free_address()

    async def pid(self) -> int:
        """See `Process`."""
        return os.getpid()

    async def peak_bytes(self) -> int | None:
        """See `MemoryMonitor`."""
        return self._monitor.peak()

    async def held_bytes(self) -> int | None:
        """See `MemoryMonitor`."""
        return self._monitor.held()

    async def build(self, settings: Settings[Any], rank: Rank) -> str | None:
        """Build and start the strategy. Return the name of its device; see `device_name`."""
        self._monitor = MemoryMonitor(rank.device)
        enter(IMPORTING)
        with _portable_errors(), _named_cause(rank, self._log):
            self._strategy = settings.build(rank)
            self._batched = BatchedServer(lambda method: getattr(self._strategy, method))
            await self._strategy.start()
        self._monitor.held()  # an engine reaches its peak memory at its start
        collect_rarely()
        return device_name()

    async def call(self, place: int, method: str, *arguments: Any) -> Any:
        """Run a method of the strategy. `place` is always 0."""
        with _portable_errors():
            return await getattr(self._strategy, method)(*arguments)

    async def post(self, calls: list[bytes]) -> None:
        """See `batching.Remote`."""
        self._batched.post(calls)

    async def collect(self) -> Answers:
        """See `batching.Remote`."""
        return await self._batched.collect()

    async def close(self) -> None:
        """See `Process`."""
        with _portable_errors():
            await self._strategy.close()


@contextmanager
def _named_cause(rank: Rank, log: Path) -> Iterator[None]:
    """Convert an error of an engine that lacked memory to `EngineShortage`, and name the exception that ended vLLM's own process.

    The log is searched too, for errors of child processes.
    """
    begin = log.stat().st_size
    try:
        yield
    except RollError:
        raise
    except Exception as error:
        with log.open("rb") as stream:
            stream.seek(begin)
            printed = stream.read().decode(errors="replace")
        if cause := engine_shortage(rank.devices, f"{error}\n{printed}"):
            raise EngineShortage(rank.role, rank.rank, cause) from error
        if cause := root_cause(printed):
            raise WorkerFailed(rank.role, rank.rank, f"{cause} (logs/{log.name})") from error
        raise


@contextmanager
def _portable_errors() -> Iterator[None]:
    """Replace an exception that cannot be sent to the driver by one with its text. Otherwise Ray would raise an unrelated error."""
    try:
        yield
    except Exception as error:
        travels = portable(error, cloudpickle.dumps, cloudpickle.loads)  # pyright: ignore[reportPrivateImportUsage]
        if travels is not error:
            raise travels from None
        raise


def _own_log(path: Path) -> None:
    """Redirect the output of this process and its children to a log file of the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = path.open("ab", buffering=0)
    os.dup2(stream.fileno(), sys.stdout.fileno())
    os.dup2(stream.fileno(), sys.stderr.fileno())


def _see(devices: Sequence[int]) -> None:
    """Restrict this process to these devices of its node. Must be called before CUDA is initialised."""
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _use_own_temporary() -> None:
    """Use the default temporary folder on hosts where the run's temporary folder does not exist, because compilers would fail there."""
    if not os.path.isdir(os.environ.get("TMPDIR", "")):
        os.environ.pop("TMPDIR", None)


def _find_programs() -> None:
    """Prepend the interpreter's folder to PATH, as an activated environment would. DeepSpeed finds ninja there for compiling its ops."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _free_address() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]
