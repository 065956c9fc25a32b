"""Joins or starts the Ray cluster of a run, and removes all traces of it at the end.

Restricts access to a Ray cluster that a run starts itself: only processes of this host with the cluster's token can use
it.

Any process that reaches Ray's ports can run code as the user. Ray 2.60 listens on every interface. If tokens are
required, its default token is in a file below the home folder. All runs share this file, and every local user may read
it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

from roll.errors import ConfigError, Fault, RollError
from roll.ray.placement import NodePlaces, gpu_counts
from roll.ray.signals import OF_ALL, blocked, handler_kept, shut_down
from roll.system.event_loop import guarded
from roll.system.leftovers import SHARED_MEMORY, Leftovers, remove_recorded
from roll.system.orphans import end_users, is_alive, is_stopped
from roll.system.own_folder import own_folder, ownerless
from roll.system.survivors import survivors_ended

LOOPBACK = "127.0.0.1"
OF_TOKENS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Ray's environment variables for requiring a token and for the token itself."""


@contextmanager
def own_token(folder: Path) -> Iterator[None]:
    """A context in which a Ray cluster that starts requires a token. The token is in a file in `folder`, which must be
    private.

    The processes that Ray starts inherit variables with the path of the file, but not the token itself.
    """
    file = folder / "ray_token"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    before = {name: os.environ.pop(name, None) for name in OF_TOKENS}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
    _read_again()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}
        _read_again()


def _read_again() -> None:
    """Make Ray reread the variables, which it reads once at import.

    The mode is read before the token, so that a thread of Ray that is still running does not look for a token that is
    gone.
    """
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def loopback() -> Iterator[str]:
    """A context in which Ray can start at the yielded loopback address. Its servers then listen only there.

    Otherwise Ray would replace a loopback address by that of a network interface, because other hosts could not use it.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield LOOPBACK
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


LOG = logging.getLogger(__name__)
RECORD = ".held"
"""Suffix of files in a run's shared-memory folder. They list the other shared-memory files of its processes."""
GRACE = 5.0
"""Time in seconds that Ray's processes have to exit before they are killed."""
HEADS = ("gcs_server", "raylet")
"""Names of the processes without which Ray cannot work."""
LOOK_EVERY = 1.0
"""Seconds between two checks of these processes."""
HEAD_SECONDS = 45.0
"""Seconds without a connection to the head of a joined cluster after which it counts as lost."""
HEAD_CONNECT_SECONDS = 5.0
"""Deadline of one connection to the head."""
RECONNECT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "150"}
"""After 60 s without the head, Ray would terminate the driver without any cleanup. The watch for it ends the run first.
"""
LOOKS_STOPPED = 12
"""A process counts as stopped after this many consecutive checks that find it stopped. It is a count, not a time,
because Ctrl-Z stops the checks together with the run.
"""
RAY_FOLDER = "r"
"""Subfolder of the run's temporary folder. Ray makes it readable by all users; its parent is private."""
LONGEST_SOCKET = 107
"""Largest number of characters in the path of a Unix socket on Linux."""
LONGEST_TEMPORARY = LONGEST_SOCKET - len(
    "/roll-1234567-abcdefgh/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
)
"""Largest number of characters in the path of the parent of a run's temporary folder."""


class ClusterUnavailable(RollError):
    """The cluster cannot be joined, or has fewer resources than the plan needs."""


@dataclass(frozen=True)
class ClusterSession:
    """A connection to Ray, and folders that exist as long as the connection."""

    shared_memory: Path
    """Folder in shared memory, for the processes of this host."""
    logs: Path
    """Folder for the output of the worker processes."""
    scratch: Path
    """Temporary folder for the worker processes of this host, for example for the sockets of engines."""
    heads: Sequence[psutil.Process] = ()
    """Ray's own processes, if the run started them."""
    joined: str | None = None
    """The address `HOST:PORT` of Ray's head, if the run joined a cluster."""
    places: NodePlaces = field(default_factory=NodePlaces)
    """The nodes of the run's devices and ranks."""
    is_lost: threading.Event = field(default_factory=threading.Event)
    """Set once the head is lost, without which only the processes of this host can be ended."""

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """A context that is cancelled if one of Ray's own processes dies or stays stopped. Stopped processes are
        killed.

        Without this, Ray would terminate the driver without any cleanup after the loss of its head.

        Raises:
            ClusterUnavailable: one of Ray's processes died or was stopped, or the head of a joined cluster is not
                reached.
        """
        async with guarded(self._keep_watching()):
            yield

    async def _keep_watching(self) -> None:
        """Check Ray's processes in a thread: a call to a stopped GCS blocks the event loop until the GCS is killed."""
        left = threading.Event()
        with ThreadPoolExecutor(1, "ray-heads") as thread:
            try:
                await asyncio.get_running_loop().run_in_executor(thread, self._watch, left)
            finally:
                left.set()

    def _watch(self, left: threading.Event) -> None:
        stopped = dict.fromkeys(self.heads, 0)
        unreached = 0.0
        while not left.wait(LOOK_EVERY):
            began = time.monotonic()
            if self.joined is not None and not _is_reached(self.joined):
                unreached += LOOK_EVERY + time.monotonic() - began
                if unreached >= HEAD_SECONDS:
                    self.is_lost.set()
                    raise _lost(self.joined, unreached)
            else:
                unreached = 0.0
            for head in self.heads:
                stopped[head] = stopped[head] + 1 if is_stopped(head.pid) else 0
                if stopped[head] >= LOOKS_STOPPED:
                    head.kill()
                    raise _head_lost(
                        head, "was stopped (SIGSTOP)", "find out who sent it SIGSTOP; the same command resumes the run"
                    )
                if not is_alive(head):
                    raise _head_lost(
                        head,
                        "died",
                        "see its output in logs/ray; without output it was killed, perhaps because host memory ran out",
                    )


def _is_reached(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), HEAD_CONNECT_SECONDS):
        return True
    return False


def _lost(address: str, seconds: float) -> ClusterUnavailable:
    problem = f"Ray's head at {address} has not been reached for {seconds:.0f} s"
    remedy = "start the cluster again if the head's host died; the same command resumes the run"
    fault = Fault("RAY_ADDRESS", problem, remedy, "failed")
    LOG.warning("%s", fault)  # now, because Ray may terminate this process while the run is being ended
    return ClusterUnavailable(str(fault))


def _head_lost(process: psutil.Process, how: str, remedy: str) -> ClusterUnavailable:
    name = str(process.pid)
    with suppress(psutil.NoSuchProcess):
        name = process.name()
    fault = Fault("Ray", f"its process {name} on this host {how}", remedy, "failed")
    LOG.info("%s", fault)  # logged now, because ending the run takes a while
    return ClusterUnavailable(str(fault))


@contextmanager
def cluster(
    run_folder: Path, gpus: int, gpus_per_node: int, hide: Callable[[str], str] = str
) -> Iterator[ClusterSession]:
    """Join the cluster at `RAY_ADDRESS`, as Ray itself does, or start one on this host if the variable is not set.

    `hide` removes secrets from Ray's logs, which contain the environment of its workers.

    Raises:
        ClusterUnavailable: the cluster cannot be joined or started.
        ConfigError: it has fewer GPUs than the plan uses.
    """
    _sweep()
    logs = run_folder.absolute() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        scratch = stack.enter_context(own_folder(temporary()))
        shared = stack.enter_context(own_folder(SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
        leftovers, heads = Leftovers(shared / f"ray{RECORD}"), list[psutil.Process]()
        if not os.environ.get("RAY_ADDRESS"):
            stack.enter_context(own_token(scratch))
            with blocked(OF_ALL):
                stack.enter_context(survivors_ended(scratch))
        try:
            heads = _connect(scratch, gpus, leftovers)
            check_gpus(gpus, gpus_per_node)
            joined = ray.get_runtime_context().gcs_address if os.environ.get("RAY_ADDRESS") else None
            yield ClusterSession(shared, logs, scratch, heads, joined, NodePlaces(-(-gpus // gpus_per_node)))
        except BaseException:
            keep_ray_logs(scratch, logs, hide)
            raise
        finally:
            leftovers.record([head.pid for head in heads])  # they have started others since
            shut_down()
            leftovers.kill(GRACE)
            end_users(scratch)  # workers that Ray forked after the record, which look for it for minutes


def _connect(scratch: Path, gpus: int, leftovers: Leftovers) -> list[psutil.Process]:
    """Join or start a cluster, and return the head processes that were started.

    All started processes are recorded in `leftovers`, because Ray does not end all of them if its start is interrupted.
    """
    before = set(psutil.Process().children())
    try:
        with handler_kept():
            if os.environ.get("RAY_ADDRESS"):
                join_cluster()
            else:
                with blocked(OF_ALL):
                    start_cluster(scratch, gpus)
    finally:
        started = [process for process in psutil.Process().children() if process not in before]
        leftovers.record([process.pid for process in started])
    return [process for process in started if process.name() in HEADS]


def temporary() -> Path:
    """Return the parent of a run's temporary folder: the system's, or /tmp if socket paths would be too long."""
    system = Path(tempfile.gettempdir())
    return system if len(str(system)) <= LONGEST_TEMPORARY else Path("/tmp")  # noqa: S108


def start_cluster(scratch: Path, gpus: int) -> None:
    """Start a cluster on this host that no other can reach. Raises ClusterUnavailable if Ray did not start."""
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
                # By default, Ray's workers and their engines have a lower priority than all other processes of the
                # host, and Ray starts an idle worker for each core, which no role would use.
                _system_config={"worker_niceness": 0, "prestart_worker_first_driver": False},
            )
    except Exception as error:  # Ray's errors have no common base class here
        problem = f"did not start on this host: {' '.join(str(error).split())}"
        remedy = "see Ray's output in logs/ray of the run folder; if the host is busy with other work, try again"
        raise ClusterUnavailable(str(Fault("Ray", problem, remedy, "failed"))) from error


def join_cluster() -> None:
    """Join the cluster at `RAY_ADDRESS`. Raises ClusterUnavailable if it cannot be joined."""
    address = os.environ["RAY_ADDRESS"]
    if "://" in address:
        remedy = "set it to the head's address, such as HEAD:6379, or submit the run to the cluster (`ray job submit`)"
        raise ClusterUnavailable(
            str(
                Fault(
                    "RAY_ADDRESS",
                    f"'{address}' is the address of a Ray client server or dashboard, which a run cannot join",
                    remedy,
                    "not_supported",
                )
            )
        )
    for name, value in RECONNECT.items():
        os.environ.setdefault(name, value)
    Config.initialize("")  # reads them
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        fault = Fault(
            "RAY_ADDRESS",
            f"the Ray cluster at '{address}' cannot be joined: {' '.join(str(error).split())}",
            "check the address with `ray status`; a cluster with token authentication also needs RAY_AUTH_MODE=token;"
            " unset RAY_ADDRESS to start a cluster here",
            "failed",
        )
        raise ClusterUnavailable(str(fault)) from error
    if unreached := unreached_node([node for node in ray.nodes() if node["Alive"]]):
        raise ClusterUnavailable(str(unreached))


def unreached_node(nodes: Sequence[Mapping[str, Any]]) -> Fault | None:
    """Return the fault of a node that Ray knows by an address of its loopback, which no other host reaches."""
    for node in nodes:
        address, host = node["NodeManagerAddress"], node["NodeManagerHostname"]
        others = [other["NodeManagerAddress"] for other in nodes if other["NodeManagerHostname"] != host]
        if others and ip_address(address).is_loopback:
            problem = (
                f"Ray knows the host {host} by {address}, which the other hosts ({', '.join(others)}) cannot reach"
            )
            remedy = f"start Ray on {host} with --node-ip-address=ADDRESS, an address that the other hosts reach"
            return Fault("RAY_ADDRESS", problem, remedy, "unfit")
    return None


def check_gpus(gpus: int, gpus_per_node: int) -> None:
    """Check that the cluster's nodes have the plan's GPUs. Raises ConfigError for too few nodes, or GPUs on one."""
    if not gpus:
        return
    counts = gpu_counts()
    nodes = -(-gpus // gpus_per_node)
    if not counts:
        on_cpu = (
            "to run on the CPU, leave device_mapping out of every role: ~actor_train.device_mapping "
            "~actor_infer.device_mapping ..."
        )
        where = "no node of the cluster" if os.environ.get("RAY_ADDRESS") else "this host"
        has = f"{where} has one that Ray sees" if where.startswith("no ") else f"Ray sees none on {where}"
        remedy = f"{on_cpu}; on a host with GPUs `python -m roll.doctor` shows why they are not visible"
        raise ConfigError(Fault("device_mapping", f"asks for {gpus} GPUs, and {has}", remedy, "too_large"))
    if len(counts) < nodes or min(counts[:nodes]) < min(gpus, gpus_per_node):
        fault = Fault(
            "device_mapping",
            f"asks for {gpus} GPUs on {nodes} node(s) of {gpus_per_node} each; the cluster's GPU nodes, by address, "
            f"have {counts}",
            "map the roles to fewer devices, set num_gpus_per_node, or start Ray on more nodes and set RAY_ADDRESS",
            "too_large",
        )
        raise ConfigError(fault)


def keep_ray_logs(scratch: Path, logs: Path, hide: Callable[[str], str]) -> None:
    """Copy Ray's logs, which it may still write: a failure is only logged and does not hide the run's end."""

    def copy(source: str, target: str) -> None:
        text = Path(source).read_text(encoding="utf-8", errors="replace")
        Path(target).write_text(hide(text), encoding="utf-8")

    for source in scratch.glob(f"{RAY_FOLDER}/session_*/logs"):
        if source.parent.is_symlink():
            continue
        try:
            shutil.copytree(
                source, logs / "ray", dirs_exist_ok=True, copy_function=copy, ignore=shutil.ignore_patterns("old")
            )
        except OSError as error:  # includes shutil.Error
            LOG.warning("some of Ray's logs could not be copied to %s: %s", logs / "ray", error)


def _sweep() -> None:
    """Remove what earlier runs left whose driver was killed: their processes and folders."""
    for parent in (temporary(), SHARED_MEMORY):
        for folder in ownerless(parent):
            for record in folder.glob(f"*{RECORD}"):
                remove_recorded(record)
            end_users(folder)
            shutil.rmtree(folder, ignore_errors=True)
