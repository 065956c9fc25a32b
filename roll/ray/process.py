"""The Ray actors that host a role's strategy: each is one process, which builds the strategy and runs the calls of its
facade.

Recognises vLLM's reports of too little memory for the start of an engine, and suggests remedies.

Measures the memory of a worker process and its child processes, such as vLLM's engine.

Finds the exception that ended vLLM's engine process. vLLM writes it to the log and passes on only that the process
has died.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import ray
import ray.util
from ray import cloudpickle

from roll.backend import Rank
from roll.backend_settings import Settings
from roll.config.derived.devices import visible_devices
from roll.errors import EngineShortage, RollError, WorkerFailed
from roll.ray.batching import BatchedServer, portable
from roll.ray.cluster import temporary
from roll.system.addresses import GLOO, NCCL, interface_of, no_interface, own_interfaces, use_node_address
from roll.system.imports import importing
from roll.system.own_folder import own_folder
from roll.system.signs import announce
from roll.system.step_memory import collect_rarely

# From vllm/v1/engine/core.py, where the traceback follows.
FATAL = re.compile(r"EngineCore (?:encountered a fatal error|failed to start)\.")
PREFIX = re.compile(r"^(?:\([^()]*pid=\d+\) )?(?:[A-Z]+ \S+ \S+ \[\S+\] )?")
"""What vLLM writes before each line of a log: the name of its process, then level, date, time and place."""
EXCEPTION = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*$")
"""The last line of a traceback."""
# From vllm/v1/executor/multiproc_executor.py.
PASSED_ON = re.compile(
    r"Worker failed with error '(?P<said>.*)', please check the stack trace above for the root cause$"
)
# From absl's handler of signals, which Ray installs in its workers, and from Python's own.
CRASH = re.compile(r"^(?:\*\*\* SIG(?:ILL|SEGV|ABRT|FPE|BUS) received|Fatal Python error: [^\n]*)", re.MULTILINE)
LONGEST_CAUSE = 500
"""Largest number of characters of a cause in a message. The log has the complete text."""


def root_cause(printed: str) -> str | None:
    """Return the exception or the fault that ended an engine's process, from what it printed; None if it printed none.

    An exception is the first one after vLLM's report of a fatal error. In a chain of exceptions, the first one is the
    cause of the others.
    """
    report = FATAL.search(printed)
    lines = (PREFIX.sub("", line) for line in printed[report.end() :].splitlines()) if report else ()
    found = next((line.strip() for line in lines if EXCEPTION.match(line)), None)
    if found is None:
        return crash[0] if (crash := CRASH.search(printed)) else None
    return PASSED_ON.sub(lambda worker: worker["said"], found)[:LONGEST_CAUSE]


ByDevice = list[dict[int, int]]
"""For each GPU of the host, the bytes that each process holds, by process id."""


class MemoryMonitor:
    """Current and peak memory of this process on its devices."""

    def __init__(self, device: str, read: Callable[[], ByDevice] | None = None) -> None:
        """`read` queries NVIDIA's driver, by default through NVML."""
        self._device, self._read = device, read or nvml
        self._most: int | None = None

    def held(self) -> int | None:
        """Return the bytes held on the fullest device, or torch's memory in this process if the driver does not list
        the process.

        Return None on the CPU, and for an engine in a child process that the driver does not list.
        """
        if self._device == "cpu":
            return None
        own = psutil.Process()
        held = held_by({own.pid, *(child.pid for child in own.children(recursive=True))}, self._read())
        torch = _torch_on_gpu()
        if held is None and torch is not None:
            return int(torch.cuda.memory_reserved())
        if held is not None:
            self._most = max(held, self._most or 0)
        return held

    def peak(self) -> int | None:
        """Return the peak in bytes: torch's peak or the largest result of `held`, whichever is larger.

        On the CPU, it is the peak resident memory of this process plus the current memory of its child processes.
        """
        if self._device == "cpu":
            own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            return own + sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))
        torch = _torch_on_gpu()
        self.held()
        return max(torch.cuda.max_memory_allocated() if torch is not None else 0, self._most or 0) or None


def _torch_on_gpu() -> Any:
    """Return torch if this process has used a GPU through it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def device_name() -> str | None:
    """Return the name of the GPU that torch uses in this process, None if it uses none."""
    torch = _torch_on_gpu()
    return torch.cuda.get_device_name() if torch is not None else None


def held_by(pids: Collection[int], devices: ByDevice) -> int | None:
    """Return the bytes of these processes on the device where they hold most; None if none is listed."""
    sums = [
        sum(size for pid, size in processes.items() if pid in pids)
        for processes in devices
        if any(pid in pids for pid in processes)
    ]
    return max(sums, default=None)


def nvml() -> ByDevice:
    """Return what NVIDIA's driver reports; an empty list if the driver or the package nvidia-ml-py is absent.

    In a container with its own process ids, the driver may not list the container's processes.
    """
    try:
        import pynvml  # pyright: ignore[reportMissingImports]  # only installed in GPU environments
    except ModuleNotFoundError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        listed = [pynvml.nvmlDeviceGetComputeRunningProcesses(handle) for handle in handles]
        return [
            {process.pid: process.usedGpuMemory for process in device if process.usedGpuMemory is not None}
            for device in listed
        ]
    finally:
        pynvml.nvmlShutdown()


# From `request_memory` in vllm/v1/worker/utils.py.
FULL = re.compile(
    r"Free memory on device \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired GPU "
    r"memory "
    r"utilization "
    r"\((?P<share>[\d.]+), (?P<asked>[\d.]+) GiB\)"
)
# Both from `_check_enough_kv_cache_memory` in vllm/v1/core/kv_cache_utils.py.
NO_CACHE = re.compile(r"No available memory for the cache blocks")
SMALL_CACHE = re.compile(
    r"\((?P<asked>[\d.]+) GiB KV cache is needed, .*? the available KV cache memory \((?P<free>[\d.]+) GiB\)"
)
# From torch's caching allocator, c10/cuda/CUDACachingAllocator.cpp.
TORCH = re.compile(
    r"CUDA out of memory\. Tried to allocate (?P<asked>[\d.]+ \w+)\..*?"
    r"total capacity of (?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free"
)

SHARE = "actor_infer.strategy_args.strategy_config.gpu_memory_utilization"
LOWER = f"lower {SHARE}, leave time_sharing on, or end other processes on the device"
RAISE = (
    f"raise {SHARE} (on the CPU kv_cache_gib), or lower prompt_length, response_length, max_num_batched_tokens or "
    f"max_num_seqs"
)


def engine_shortage(devices: Sequence[int], text: str) -> str | None:
    """Return a message with the device, the keys to change, and, if vLLM reports them, the requested and the free
    memory.

    Return None if memory was not the problem. `text` is the output of vLLM's engine process, because its exception is
    not passed on.
    """
    where = (
        f"device {devices[0]}"
        if len(devices) == 1
        else f"devices {', '.join(map(str, devices))}"
        if devices
        else "its device"
    )
    if found := FULL.search(text):
        asked = f"it requested {found['asked']} GiB (gpu_memory_utilization {found['share']})"
        return (
            f"too little memory on {where} to start: {asked}, and {found['free']} of {found['total']} GiB were free; "
            f"{LOWER}"
        )
    if found := SMALL_CACHE.search(text):
        asked = f"the longest sequence needs {found['asked']} GiB of KV cache, and {found['free']} GiB were left for it"
        return f"too little memory on {where} to start: {asked}; {RAISE}"
    if NO_CACHE.search(text):
        return (
            f"too little memory on {where} to start: the model used its whole share, and nothing was left for a KV "
            f"cache; {RAISE}"
        )
    if found := TORCH.search(text):
        asked = f"it requested another {found['asked']}, and {found['free']} of {found['total']} were free"
        return f"too little memory on {where} to start: {asked}; {LOWER}"
    return None


MOST_CALLS = 1 << 20
"""Largest number of concurrent calls in a process. Requests are fewer: a pause or sync never waits for one."""

IMPORTING = "loading libraries"
"""Stage that is shown until the strategy enters its first stage."""


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class Process:
    """Hosts a strategy with blocking methods. Calls run one after another."""

    def __init__(self, log_file: str, devices: Sequence[int]) -> None:
        self._log, self._on_cpu = Path(log_file), not devices
        _own_log(self._log)
        _see(devices)
        _find_programs()
        _use_own_temporary()
        _use_node_address()
        keep_signal_mask()
        announce("process started")

    def preload(self, imports: Callable[[bool], None], *_: None) -> None:
        """Import the strategy's libraries ahead of `build`. `imports` gets whether this process has no GPU.

        Ray calls it once the results that it waits for are there, and does not call it if one of them is an error.
        """
        announce(IMPORTING)
        with importing():
            imports(self._on_cpu)

    def free_address(self) -> tuple[str, int]:
        """Return this host's address and a free port for the role's rendezvous."""
        return _free_address()

    def ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function says in this process, on its host."""
        return question(*arguments)

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
        announce(IMPORTING)
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
class AsyncProcess(BatchedServer):
    """Hosts a strategy whose methods are coroutines. Calls run concurrently."""

    def __init__(self, log_file: str, devices: Sequence[int]) -> None:
        super().__init__()
        self._log, self._on_cpu = Path(log_file), not devices
        _own_log(self._log)
        _see(devices)
        _find_programs()
        _use_own_temporary()
        _use_node_address()
        keep_signal_mask()
        announce("process started")

    async def preload(self, imports: Callable[[bool], None], *_: None) -> None:
        """See `Process`."""
        announce(IMPORTING)
        with importing():
            imports(self._on_cpu)

    async def free_address(self) -> tuple[str, int]:
        """See `Process`."""
        return _free_address()

    async def ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """See `Process`."""
        return await asyncio.to_thread(question, *arguments)

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
        announce(IMPORTING)
        with _portable_errors(), _named_cause(rank, self._log):
            self.strategy = settings.build(rank)
            await self.strategy.start()
        self._monitor.held()  # an engine reaches its peak memory at its start
        collect_rarely()
        return device_name()

    async def call(self, place: int, method: str, *arguments: Any) -> Any:
        """Run a method of the strategy. `place` is always 0."""
        with _portable_errors():
            return await getattr(self.strategy, method)(*arguments)

    async def close(self) -> None:
        """See `Process`."""
        with _portable_errors():
            await self.strategy.close()


@contextmanager
def _named_cause(rank: Rank, log: Path) -> Iterator[None]:
    """Convert an error of an engine that lacked memory to `EngineShortage`, and name the exception that ended vLLM's
    own process.

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
    """Replace an exception that cannot be sent to the driver by one with its text. Ray would raise another error."""
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
    """Use an own temporary folder on hosts without the run's, because compilers would fail there. See `Caretaker`."""
    of_run = os.environ.get("TMPDIR")
    if of_run is None or os.path.isdir(of_run):
        return
    del os.environ["TMPDIR"]
    stack = ExitStack()
    atexit.register(stack.close)
    os.environ["TMPDIR"] = str(stack.enter_context(own_folder(temporary())))
    tempfile.tempdir = None  # so that Python reads the variable again


def keep_signal_mask() -> None:
    """Let Python's `multiprocessing` not unblock SIGTERM, which this process blocks; see `roll.ray.signals`.

    It blocks some signals while it starts its tracker of shared memory, and unblocks them whatever they were before.
    """
    resource_tracker._IGNORED_SIGNALS = ()  # pyright: ignore[reportAttributeAccessIssue]


def _find_programs() -> None:
    """Prepend the interpreter's folder to PATH, as an activated environment would: DeepSpeed needs its ninja."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _use_node_address() -> None:
    """Let gloo, NCCL and vLLM use Ray's address of this node, which other hosts reach, where no variable says else."""
    use_node_address(ray.util.get_node_ip_address())


def network_notice() -> str | None:
    """Return why gloo and NCCL cannot be told to use Ray's address of this node; None if they can or were told."""
    address, interfaces = ray.util.get_node_ip_address(), own_interfaces()
    told = bool(os.environ.get(GLOO) and os.environ.get(NCCL))
    return None if told or interface_of(address, interfaces) else no_interface(address, interfaces)


def _free_address() -> tuple[str, int]:
    address = ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return address, probe.getsockname()[1]
