"""Facts about a machine, for the doctor. `gather.py` gathers them, and `checks.py` judges them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from roll.training.deepspeed.extension_locks import ExtensionLock

COMPILED_OPS = "compiled ops"
"""`Folder.use` of torch's extension cache."""


class Verdict(StrEnum):
    """Consequence of a finding for a run."""

    OK = "ok"
    WARNING = "warning"
    """A run starts, but may be slow or fail later."""
    BROKEN = "broken"
    """A run that needs the subject fails."""


@dataclass(frozen=True)
class Diagnosis:
    """One line of the report."""

    subject: str
    """The part of the machine, such as a package or a device."""
    verdict: Verdict
    found: str
    """What was found, for users."""
    remedy: str = ""
    """The command or the change that fixes the problem, empty if nothing needs to be done."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it."""

    name: str
    total: int
    """Bytes."""
    used: int
    """Bytes in use by any process."""
    utilisation: int | None = None
    """Percentage of the driver's last sampling period (at most a second) in which a kernel ran. None if the driver does
    not report it.
    """


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
    """Facts about a machine. If `torch`, `ops` or `ray_nodes` could not be determined, that field is a text with the
    reason.
    """

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
