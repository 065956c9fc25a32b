"""The interface of containers: commands and files, and what is bounded. Every kind of container implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from roll.errors import EnvironmentFailed
from roll.system.sizes import MIB

Engine = Literal["auto", "bubblewrap", "podman", "docker"]
CACHE = "~/.cache/roll/images"
"""Default of `container.cache`."""
MOST_OUTPUT = 1 << 16
"""Bytes that are kept of each output of a command, from its beginning."""
MOST_FILES = 64 * MIB
"""Bytes of all files that one call returns."""


class ContainerLost(EnvironmentFailed):
    """A container cannot be started, or no longer answers. The episode is broken, and has no reward."""


class FilesRefused(Exception):
    """Files cannot be written or read, for a reason that lies in the container. `str()` gives it."""


class CommandEnd(Enum):
    """How a command ended."""

    EXITED = "exited"
    TIME = "time"
    """It was killed at its deadline."""
    MEMORY = "memory"
    """All processes of the container held too much memory together, and were killed."""


class ContainerFile(NamedTuple):
    """A file or a symbolic link."""

    content: bytes
    mode: int = 0o644
    """Permissions, or LINK."""


@dataclass(frozen=True)
class CommandResult:
    """What a command has done."""

    ending: CommandEnd
    status: int
    """Exit status; negative for the signal that ended it."""
    stdout: bytes
    """The first MOST_OUTPUT bytes."""
    stderr: bytes
    """The first MOST_OUTPUT bytes."""
    total: int
    """Bytes that it wrote to both, also beyond these."""


@dataclass(frozen=True)
class ContainerBounds:
    """Limits of one container."""

    cpus: int = 1
    """CPU cores that it may use."""
    memory_mib: int = 1024
    """Memory of all its processes."""
    disk_mib: int = 512
    """What it may write over its image."""
    processes: int = 128
    """Processes and threads at a time."""
    network: bool = False
    """Whether it may use the network of the machine."""


@dataclass(frozen=True)
class ContainerSettings:
    """How containers are held."""

    image: str | None = None
    """Path of an OCI layout, or a name for podman and docker. None: each row names its own."""
    engine: Engine = "auto"
    """`auto`: bubblewrap for a path, podman or docker for a name."""
    bounds: ContainerBounds = field(default_factory=ContainerBounds)
    warm: int = 1
    """Containers of `image` that are kept ready."""
    cache: str = CACHE
    """Folder of unpacked images."""


class Container(Protocol):
    """A running container of one episode. Calls are made one after another.

    A call that is cancelled, or does not end long after its deadline, closes the container.
    """

    async def run(
        self, command: Sequence[str], seconds: float, folder: str | None = None, variables: Mapping[str, str] = {}
    ) -> CommandResult:
        """Run a command. A deadline that passes, an exit status and a signal are results.

        Args:
            seconds: its deadline. After it, the command and its descendants are killed.
            folder: where it runs, and which is created; the image's working folder by default.
            variables: environment variables in addition to the image's.

        Raises:
            ContainerLost: the container has ended or does not answer.
        """
        ...

    async def put(self, files: Mapping[str, ContainerFile]) -> None:
        """Write files at absolute paths, which replace what is there.

        Raises:
            FilesRefused: the container cannot write them: its disk is full, or a folder is a file.
            ContainerLost: the container has ended or does not answer.
        """
        ...

    async def get(self, path: str, most: int = MOST_FILES) -> dict[str, ContainerFile]:
        """Return a file or the files below a folder, by absolute path. Devices, pipes and sockets are left out.

        Raises:
            FilesRefused: there is no such path, it cannot be read, or its files have more than `most` bytes.
            ContainerLost: the container has ended or does not answer.
        """
        ...

    async def end_processes(self) -> None:
        """Kill all processes that commands have left. Raises ContainerLost if the container does not answer."""
        ...

    async def close(self) -> None:
        """End the container with its processes, and remove its files. May be called again."""
        ...
