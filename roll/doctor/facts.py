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
    """Meaning of a fact for a run."""

    OK = "ok"
    WARNING = "warning"
    """A run starts, but may be slow or fail later."""
    BROKEN = "broken"
    """A run that needs this fails."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    verdict: Verdict
    found: str
    """The finding."""
    remedy: str = ""
    """The command or the change that mends it, empty if nothing is to do."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it."""

    name: str
    total: int
    """Bytes."""
    used: int
    """Bytes in use by any process."""
    utilisation: int | None = None
    """Percentage of the driver's last sampling period (at most a second) with a running kernel. None if the driver does not report it."""


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
    """The network to other machines."""

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
    """Facts about a machine. A fact that could not be determined is a text with the reason."""

    python: tuple[int, int]
    executable: str
    """The interpreter, which decides the examined environment."""
    required: Mapping[str, str]
    """Versions that the project's metadata allow, by package."""
    locked: Mapping[str, str]
    """Version that the tests run with, by package."""
    installed: Mapping[str, str]
    """Installed version, by package."""
    driver: str | None
    gpus: tuple[Gpu, ...]
    links: Mapping[tuple[int, int], str]
    """Connection of each pair of GPUs, in the words of `nvidia-smi topo -m`: NV18, PIX, PHB, SYS, ..."""
    network: Network
    shared_memory: int
    """Bytes free in /dev/shm."""
    folders: tuple[Folder, ...]
    open_files: int
    """Soft limit of this shell."""
    memory: int
    """Bytes of the host's memory that are available."""
    tools: Mapping[str, str | None]
    """Path by the name of a program (`c++`, `ninja`, `nvcc`)."""
    nvcc: str | None
    """Version of the CUDA toolkit."""
    arch_list: str | None
    """`TORCH_CUDA_ARCH_LIST` of this shell."""
    torch: Mapping[str, Any] | str
    """Output of `torch_probe.py`."""
    extension_locks: tuple[ExtensionLock, ...]
    """Locks of running or killed compilations."""
    ops: Mapping[str, Any] | str
    """Whether each DeepSpeed op is `installed` and can be compiled (`compatible`)."""
    sandbox: str | None = None
    """Why no program can run in a sandbox, None if one can."""
    ray_address: str | None = None
    """`RAY_ADDRESS` of this shell."""
    ray_nodes: tuple[Mapping[str, Any], ...] | str = ()
    """`address` and `gpus` of each living node, and `niceness` of its workers, if there is a cluster to join."""
