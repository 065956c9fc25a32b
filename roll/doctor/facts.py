"""Facts about a machine, for the doctor. Gathered in `gather.py`, judged in `checks.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from roll.strategies.extension_locks import ExtensionLock

COMPILED_OPS = "compiled ops"
"""The use of the folder that is torch's extension cache."""


class Verdict(StrEnum):
    """What a fact means for a run."""

    OK = "ok"
    WARNING = "warning"
    """A run starts, but may be slow, or fail later."""
    BROKEN = "broken"
    """A run that needs this fails."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    verdict: Verdict
    found: str
    """What is there."""
    remedy: str = ""
    """The command or the change that mends it; empty where nothing is to be done."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it."""

    name: str
    total: int
    """Bytes."""
    used: int
    """Bytes, by whichever process."""
    utilisation: int | None = None
    """Percent of the driver's last sampling period, at most a second, in which a kernel ran. None where the driver does not tell."""


@dataclass(frozen=True)
class Folder:
    """A folder that runs write into."""

    use: str
    path: str
    problem: str | None
    """Why nothing can be written there; None if something can."""
    free: int
    """Bytes on its file system."""
    remedy: str
    """How another folder is chosen."""


@dataclass(frozen=True)
class Network:
    """The way to other machines."""

    interfaces: tuple[str, ...]
    """Names of those that are up and have an IPv4 address; without the loopback."""
    default: str | None
    """Name of the one that the default route takes."""
    infiniband: tuple[str, ...]
    """Names of InfiniBand, RoCE and EFA devices."""
    chosen: str | None
    """`NCCL_SOCKET_IFNAME` of this shell."""


@dataclass(frozen=True)
class Facts:
    """A machine. What could not be found out is a text that says why."""

    python: tuple[int, int]
    executable: str
    """The interpreter, and with it the environment that is examined."""
    required: Mapping[str, str]
    """For each package, the versions that the project's metadata allow."""
    locked: Mapping[str, str]
    """For each package, the version that the tests run with."""
    installed: Mapping[str, str]
    """For each package, the installed version."""
    driver: str | None
    gpus: tuple[Gpu, ...]
    links: Mapping[tuple[int, int], str]
    """For each pair of GPUs, the connection as `nvidia-smi topo -m` calls it: NV18, PIX, PHB, SYS, ..."""
    network: Network
    shared_memory: int
    """Bytes free in /dev/shm."""
    folders: tuple[Folder, ...]
    open_files: int
    """Soft limit of this shell."""
    memory: int
    """Bytes of the host's memory that are available."""
    tools: Mapping[str, str | None]
    """For each name of a program (`c++`, `ninja`, `nvcc`), its path."""
    nvcc: str | None
    """Version of the CUDA toolkit that compiles."""
    arch_list: str | None
    """`TORCH_CUDA_ARCH_LIST` of this shell."""
    torch: Mapping[str, Any] | str
    """What `torch_probe.py` prints."""
    extension_locks: tuple[ExtensionLock, ...]
    """Locks of compilations that are running or were killed."""
    ops: Mapping[str, Any] | str
    """For each DeepSpeed op, whether it is `installed` and whether it can be compiled (`compatible`)."""
    sandbox: str | None = None
    """Why no program can be run in a sandbox; None if one can."""
    ray_address: str | None = None
    """`RAY_ADDRESS` of this shell."""
    ray_nodes: tuple[Mapping[str, Any], ...] | str = ()
    """`address` and `gpus` of each living node, and `niceness` of its workers, if there is a cluster to join."""
