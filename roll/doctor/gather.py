"""The facts of this machine: what its tools, its files and its environment say."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from roll.config.shipped import locks_folder
from roll.doctor.facts import Facts, Folder, Gpu, Network

PROBE_SECONDS = 120.0
TOOL_SECONDS = 20.0
CONNECT_SECONDS = 5.0
ROUTE = Path("/proc/net/route")
INFINIBAND = Path("/sys/class/infiniband")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def gather() -> Facts:
    """Look at everything. Takes some seconds: torch, DeepSpeed and Ray are each asked in a process of their own."""
    driver, gpus = _gpus()
    kind = "gpu" if gpus else "cpu"
    address = os.environ.get("RAY_ADDRESS")
    return Facts(
        python=(sys.version_info.major, sys.version_info.minor),
        required=required(_own_requirements(), kind),
        locked=locked(_read(locks_folder() / f"{kind}.lock")),
        installed={canonicalize_name(found.name): found.version for found in importlib.metadata.distributions()},
        driver=driver,
        gpus=gpus,
        links=links(_output("nvidia-smi", "topo", "-m")) if len(gpus) > 1 else {},
        network=_network(),
        shared_memory=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        folders=tuple(_folder(use, path, remedy) for use, path, remedy in _places()),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memory=psutil.virtual_memory().available,
        tools={name: shutil.which(name) for name in ("c++", "ninja", "nvcc")},
        arch_list=os.environ.get("TORCH_CUDA_ARCH_LIST"),
        torch=_probe("roll.doctor.torch_probe"),
        ops=_probe("roll.strategies.deepspeed_ops"),
        ray_address=address,
        ray_nodes=_ray_nodes(address) if address else (),
    )


def required(lines: list[str], kind: str) -> dict[str, str]:
    """By package, what the project's metadata ask for on a machine of this kind."""
    found: dict[str, list[str]] = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": kind}):
            found.setdefault(canonicalize_name(requirement.name), []).append(str(requirement.specifier))
    return {name: ",".join(filter(None, specifiers)) for name, specifiers in found.items()}


def locked(text: str) -> dict[str, str]:
    """By package, the version of a lock."""
    return {canonicalize_name(name): version for name, version in re.findall(r"^([A-Za-z][\w.-]*)==([^\s;]+)", text, re.MULTILINE)}


def links(text: str) -> dict[tuple[int, int], str]:
    """The table of `nvidia-smi topo -m`, for pairs of GPUs."""
    rows = [line.split() for line in ESCAPE.sub("", text).splitlines()]
    table = {int(row[0][3:]): row[1:] for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and "X" in row}
    return {(one, other): table[one][other] for one in table for other in table if one < other}


def default_interface(text: str) -> str | None:
    """The interface of the default route in `/proc/net/route`."""
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == fields[7] == "00000000":
            return fields[0]
    return None


def _own_requirements() -> list[str]:
    try:
        return importlib.metadata.requires("roll") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _gpus() -> tuple[str | None, tuple[Gpu, ...]]:
    query = "--query-gpu=driver_version,name,memory.total,memory.used"
    rows = [
        [cell.strip() for cell in row] for row in csv.reader(_output("nvidia-smi", query, "--format=csv,noheader,nounits").splitlines())
    ]
    gpus = tuple(Gpu(row[1], _mib(row[2]), _mib(row[3])) for row in rows if len(row) == 4)
    return (rows[0][0] if gpus else None), gpus


def _mib(cell: str) -> int:
    """Bytes; 0 where the driver does not say (`[N/A]`)."""
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
    return Network(tuple(sorted(names)), default_interface(_read(ROUTE)), tuple(devices), os.environ.get("NCCL_SOCKET_IFNAME"))


def _places() -> list[tuple[str, Path, str]]:
    cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    return [
        ("temporary files", Path(tempfile.gettempdir()), "export TMPDIR=/another/folder"),
        ("models and data", cache, "export HF_HOME=/another/folder"),
        ("compiled code", Path.home() / ".cache", "export HOME=/another/folder, or mend its owner"),
        ("working directory", Path.cwd(), "change to another folder, or give output_dir as an absolute path"),
    ]


def _folder(use: str, path: Path, remedy: str) -> Folder:
    nearest = path
    while not nearest.exists():
        nearest = nearest.parent
    return Folder(use, str(path), nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK), shutil.disk_usage(nearest).free, remedy)


def _ray_nodes(address: str) -> Any:
    """Ray itself tries for minutes where nobody listens."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            return f"nobody answers there ({error})"
    return _probe("roll.workers.survey")


def _probe(module: str) -> Any:
    """What a module prints as JSON in its last line, or why it did not."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False, env=_without_threads()
        )
    except subprocess.TimeoutExpired:
        return f"no answer after {PROBE_SECONDS:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
    return json.loads(done.stdout.strip().splitlines()[-1])


def _without_threads() -> Mapping[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def _output(*command: str) -> str:
    """What a tool prints; nothing where it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return ""


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
