"""Joins or starts the Ray cluster of a run, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

from roll.errors import Fault, RollError
from roll.system.leftovers import SHARED_MEMORY, Leftovers, remove_recorded
from roll.system.orphans import is_alive
from roll.system.own_folder import own_folder, ownerless
from roll.workers.doors import loopback, own_token
from roll.workers.guarded import guarded
from roll.workers.placement import gpu_counts

LOG = logging.getLogger(__name__)
RECORD = ".held"
"""Suffix of files in a run's folder of shared memory that list its processes' other shared memory."""
GRACE = 5.0
"""Seconds that Ray's processes get to end by themselves."""
HEADS = ("gcs_server", "raylet")
"""Names of the processes that Ray cannot work without."""
LOOK_EVERY = 1.0
"""Seconds between two checks of them."""
LOOKS_STOPPED = 12
"""Consecutive checks that have to find one of them stopped. They are counted, not timed, because Ctrl-Z stops the checks together with
the run.
"""
RAY_FOLDER = "r"
"""Subfolder of the run's temporary folder. Ray makes it readable by every user of the host; the folder above it is private."""
LONGEST_SOCKET = 107
LONGEST_TEMPORARY = LONGEST_SOCKET - len("/roll-1234567-abcdefgh/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""Number of characters in a temporary folder's name."""


class ClusterUnavailable(RollError):
    """The cluster cannot be joined, or has fewer resources than the plan needs."""


@dataclass(frozen=True)
class ClusterSession:
    """A connection to Ray, and folders that exist as long as the connection."""

    shared_memory: Path
    """Folder in memory shared by the processes of this host."""
    logs: Path
    """Folder of the worker processes' output."""
    scratch: Path
    """Temporary folder of this host's worker processes, for sockets of engines and the like."""
    heads: Sequence[psutil.Process] = ()
    """Ray's own processes, if the run started them."""

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While the block lasts, end the work if one of Ray's own processes dies or stays stopped. A stopped one is killed.

        After the loss of its head, Ray would end this process without any cleanup.

        Raises:
            ClusterUnavailable: one has died or was stopped.
        """
        async with guarded(self._watch()):
            yield

    async def _watch(self) -> None:
        """Runs in a thread: a call to a stopped GCS blocks the event loop until the GCS is killed."""
        left = threading.Event()
        with ThreadPoolExecutor(1, "ray-heads") as thread:
            try:
                await asyncio.get_running_loop().run_in_executor(thread, self._look, left)
            finally:
                left.set()

    def _look(self, left: threading.Event) -> None:
        stopped = dict.fromkeys(self.heads, 0)
        while not left.wait(LOOK_EVERY):
            for head in self.heads:
                stopped[head] = stopped[head] + 1 if is_stopped(head) else 0
                if stopped[head] >= LOOKS_STOPPED:
                    head.kill()
                    raise _head_lost(
                        head, "was stopped (SIGSTOP)", "another process or a person sent it SIGSTOP; the same command resumes the run"
                    )
                if not is_alive(head):
                    raise _head_lost(
                        head, "died", "its output is in logs/ray; without output it was killed: the host's memory may have run out"
                    )


def is_stopped(process: psutil.Process) -> bool:
    """Whether a process was stopped by SIGSTOP."""
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_STOPPED
    return False


def _head_lost(process: psutil.Process, how: str, remedy: str) -> ClusterUnavailable:
    name = str(process.pid)
    with suppress(psutil.NoSuchProcess):
        name = process.name()
    fault = Fault("Ray", f"its process {name} on this host {how}", remedy)
    LOG.info("%s", fault)  # it takes a while until the run has ended
    return ClusterUnavailable(str(fault))


@contextmanager
def cluster(run_folder: Path, gpus: int, gpus_per_node: int, hide: Callable[[str], str] = str) -> Iterator[ClusterSession]:
    """Join the cluster that `RAY_ADDRESS` names, as Ray itself does, or start one on this host.

    `hide` removes secrets from Ray's logs, which contain the environment of its workers.

    Raises:
        ClusterUnavailable: it cannot be joined or started, or has fewer GPUs than the plan's roles are mapped to.
    """
    _sweep()
    logs = run_folder.absolute() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        scratch = stack.enter_context(own_folder(temporary()))
        shared = stack.enter_context(own_folder(SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
        leftovers = Leftovers(shared / f"ray{RECORD}")
        if not os.environ.get("RAY_ADDRESS"):
            stack.enter_context(own_token(scratch))
        try:
            heads = _connect(scratch, gpus, leftovers)
            check_gpus(gpus, gpus_per_node)
            yield ClusterSession(shared, logs, scratch, heads)
        except BaseException:
            keep_ray_logs(scratch, logs, hide)
            raise
        finally:
            ray.shutdown()
            leftovers.remove(GRACE)


def _connect(scratch: Path, gpus: int, leftovers: Leftovers) -> list[psutil.Process]:
    """Join or start a cluster and return the head processes that were started. Ray does not end all of them if its start is interrupted."""
    before = set(psutil.Process().children())
    try:
        if os.environ.get("RAY_ADDRESS"):
            join()
        else:
            with hangups_blocked():
                start(scratch, gpus)
    except SystemExit:  # Ray's handler of SIGTERM, which its start installs
        raise KeyboardInterrupt from None
    finally:
        started = [process for process in psutil.Process().children() if process not in before]
        leftovers.look([process.pid for process in started])
    return [process for process in started if process.name() in HEADS]


@contextmanager
def hangups_blocked() -> Iterator[None]:
    """Let processes that start in this block ignore the SIGHUP of a closed terminal, because the driver saves first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def temporary() -> Path:
    """Return the parent of a run's temporary folder: the system's, or /tmp if the system's makes socket names too long for Linux."""
    system = Path(tempfile.gettempdir())
    return system if len(str(system)) <= LONGEST_TEMPORARY else Path("/tmp")  # noqa: S108


def start(scratch: Path, gpus: int) -> None:
    """Start a cluster on this host that no other host can reach.

    Raises:
        ClusterUnavailable: Ray did not start.
    """
    try:
        with loopback() as address:
            ray.init(
                address="local",
                num_gpus=None if gpus else 0,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=1 << 30,
                _node_ip_address=address,
                _temp_dir=str(scratch / RAY_FOLDER),
                # Otherwise Ray's workers and their engines would yield to every other process of the host.
                _system_config={"worker_niceness": 0},
            )
    except Exception as error:  # Ray's errors here have no common class
        problem = f"did not start on this host: {' '.join(str(error).split())}"
        remedy = "Ray's output is in logs/ray of the run's folder; on a host that is busy with other work, try again"
        raise ClusterUnavailable(str(Fault("Ray", problem, remedy))) from error


def join() -> None:
    """Join the cluster that `RAY_ADDRESS` names.

    Raises:
        ClusterUnavailable: it cannot be joined.
    """
    address = os.environ["RAY_ADDRESS"]
    if "://" in address:
        remedy = "give the address of the head, as HEAD:6379, or leave the run to the cluster with `ray job submit`"
        raise ClusterUnavailable(
            str(Fault("RAY_ADDRESS", f"'{address}' is an address of Ray's client or dashboard, where no run can join", remedy))
        )
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        fault = Fault(
            "RAY_ADDRESS",
            f"the Ray cluster at '{address}' cannot be joined: {' '.join(str(error).split())}",
            "check the address with `ray status`; a cluster with token authentication also needs RAY_AUTH_MODE=token;"
            " unset RAY_ADDRESS to start a cluster here",
        )
        raise ClusterUnavailable(str(fault)) from error


def check_gpus(gpus: int, gpus_per_node: int) -> None:
    """Compare the plan's devices with the GPUs of the cluster's nodes.

    Raises:
        ClusterUnavailable: there are too few nodes with GPUs, or one of them has too few.
    """
    if not gpus:
        return
    counts = gpu_counts()
    nodes = -(-gpus // gpus_per_node)
    if not counts:
        on_cpu = "to run on the CPU, leave device_mapping out of every role: ~actor_train.device_mapping ~actor_infer.device_mapping ..."
        where = "no node of the cluster" if os.environ.get("RAY_ADDRESS") else "this host"
        has = f"{where} has one that Ray sees" if where.startswith("no ") else f"Ray sees none on {where}"
        remedy = f"{on_cpu}; on a host with GPUs `python -m roll.doctor` shows why they are not visible"
        raise ClusterUnavailable(str(Fault("device_mapping", f"asks for {gpus} GPUs, and {has}", remedy)))
    if len(counts) < nodes or min(counts[:nodes]) < min(gpus, gpus_per_node):
        fault = Fault(
            "device_mapping",
            f"asks for {gpus} GPUs on {nodes} node(s) of {gpus_per_node}; the cluster's nodes with GPUs have, by address, {counts}",
            "map the roles to fewer devices, set num_gpus_per_node, or start Ray on more nodes and set RAY_ADDRESS",
        )
        raise ClusterUnavailable(str(fault))


def keep_ray_logs(scratch: Path, logs: Path, hide: Callable[[str], str]) -> None:
    """Copy Ray's logs. Ray still writes them, so a failed copy is only reported and does not hide why the run ended."""

    def copy(source: str, target: str) -> None:
        text = Path(source).read_text(encoding="utf-8", errors="replace")
        Path(target).write_text(hide(text), encoding="utf-8")

    for source in scratch.glob(f"{RAY_FOLDER}/session_*/logs"):
        if source.parent.is_symlink():
            continue
        try:
            shutil.copytree(source, logs / "ray", dirs_exist_ok=True, copy_function=copy, ignore=shutil.ignore_patterns("old"))
        except OSError as error:  # shutil.Error is one
            LOG.warning("some of Ray's logs could not be copied to %s: %s", logs / "ray", error)


def _sweep() -> None:
    """Remove the folders of runs whose driver was killed before it removed them."""
    for parent in (temporary(), SHARED_MEMORY):
        for folder in ownerless(parent):
            for record in folder.glob(f"*{RECORD}"):
                remove_recorded(record)
            shutil.rmtree(folder, ignore_errors=True)
