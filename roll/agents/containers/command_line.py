"""Containers of podman and docker, by their command lines, which are the same for what is used here.

The first process of a container waits for `cat`, which reads from a pipe of this process. It ends when this process
ends, and the engine then removes the container. A container that outlives it nevertheless is removed by the next
process that starts containers on this host: a label names the folder that its owner locks.
"""

from __future__ import annotations

import asyncio
import io
import os
import secrets
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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
from roll.agents.containers.layout import BadImage
from roll.rewards.sandbox.inside.commands import LINK, OPEN_FILES
from roll.system.event_loop import uninterrupted
from roll.system.own_folder import LOCK, LockHeld, holding_lock, remove_ownerless, try_lock
from roll.system.sizes import MIB

LABEL = "roll.owner"
"""Label with the folder of the process that started a container."""
CALL_SECONDS = 60.0
"""Deadline of a call of the engine that runs no command: to start, to remove, to copy."""
PULL_SECONDS = 3600.0
ENGINE_FAILED = 125
"""Exit status of an engine that could not do what it was asked for. A command may have it as well."""
FIRST = ("-c", "cat; exit 0")
"""Arguments of the first process, a shell: it waits for `cat`, and reaps the processes that others leave behind."""
KILL_ALL = ("sh", "-c", "kill -9 -1")
LOCK_FOLDER = Path("~/.cache/roll")


class _Said(NamedTuple):
    """What a call of the engine said."""

    status: int | None
    """Exit status; None if it was killed at its deadline."""
    stdout: bytes
    stderr: bytes
    total: int

    @property
    def complaint(self) -> str:
        """The last line of stderr."""
        return self.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:500]


async def _process(words: Sequence[str]) -> asyncio.subprocess.Process:
    """Start a program with three pipes."""
    pipe = subprocess.PIPE
    starting = asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe, limit=MIB)
    return await uninterrupted(starting)


async def _called(
    words: Sequence[str], given: bytes = b"", seconds: float = CALL_SECONDS, most: int = MOST_OUTPUT
) -> _Said:
    """Run a program, and keep the first `most` bytes of each of its outputs. It is killed after `seconds`."""
    process = await _process(words)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    kept, totals = [bytearray(), bytearray()], [0, 0]

    async def read(number: int, pipe: asyncio.StreamReader) -> None:
        while chunk := await pipe.read(MIB):
            totals[number] += len(chunk)
            kept[number].extend(chunk[: max(most - len(kept[number]), 0)])

    async def write(pipe: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):  # the program ended without reading it
            pipe.write(given)
            await pipe.drain()
        pipe.close()

    status: int | None = None
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(write(process.stdin), read(0, process.stdout), read(1, process.stderr))
                status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return _Said(status, bytes(kept[0]), bytes(kept[1]), sum(totals))


def pull(engine: str, image: str) -> None:
    """Pull an image unless this host has it. Processes of this host pull one after another. Blocks meanwhile.

    Raises:
        BadImage: the engine does not run, or cannot pull the image.
    """
    folder = LOCK_FOLDER.expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with holding_lock(folder / "pull.lock", PULL_SECONDS):
            if subprocess.run(
                [engine, "image", "inspect", image], capture_output=True, timeout=CALL_SECONDS
            ).returncode:
                subprocess.run([engine, "pull", image], capture_output=True, timeout=PULL_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:500]
        remedy = f"check that `{engine} pull {image}` works on this host"
        raise BadImage(f"{engine} cannot pull '{image}': {said}", remedy, "not_found") from error
    except (OSError, subprocess.SubprocessError, LockHeld) as error:
        remedy = f"check that `{engine} info` works on this host"
        raise BadImage(f"{engine} does not work: {error}", remedy, "failed") from error


async def remove_orphans(engine: str) -> list[str]:
    """Remove the containers whose owner has ended, and the owner's folder. Return their names."""
    listed = await _called([engine, "ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}"])
    removed = []
    for name in listed.stdout.decode("utf-8", "replace").split():
        words = [engine, "inspect", "--format", f'{{{{index .Config.Labels "{LABEL}"}}}}', name]
        owner = (await _called(words)).stdout.decode("utf-8", "replace").strip()
        if owner and _is_over(Path(owner)):
            await _called([engine, "rm", "-f", name])
            removed.append(name)
    await asyncio.to_thread(remove_ownerless, Path(tempfile.gettempdir()))
    return removed


def _is_over(owner: Path) -> bool:
    """Whether no process of this host holds an owner's folder. Removes the folder's lock from nobody."""
    try:
        with (owner / LOCK).open("rb") as lock:
            return try_lock(lock)
    except FileNotFoundError:
        return True
    except OSError:
        return False


class CommandLineContainer:
    """A container of podman or docker; implements `Container`. `start` creates one."""

    def __init__(self, engine: str, name: str, process: asyncio.subprocess.Process) -> None:
        self._engine, self._name, self._process = engine, name, process
        self._closed = False

    @classmethod
    async def start(cls, engine: str, image: str, bounds: ContainerBounds, owner: Path) -> CommandLineContainer:
        """Start a container.

        Args:
            owner: folder of this process, whose lock it holds.

        Raises:
            ContainerLost: it did not start.
        """
        name = f"roll-{os.getpid()}-{secrets.token_hex(6)}"
        network = [] if bounds.network else ["--network", "none"]
        limits = ["--memory", f"{bounds.memory_mib}m", "--memory-swap", f"{bounds.memory_mib}m"]
        limits += ["--cpus", str(bounds.cpus), "--pids-limit", str(bounds.processes)]
        limits += ["--ulimit", f"fsize={bounds.disk_mib * MIB}:{bounds.disk_mib * MIB}"]
        limits += ["--ulimit", f"nofile={OPEN_FILES}:{OPEN_FILES}"]
        limits += ["--security-opt", "no-new-privileges", "--cap-drop", "NET_RAW"]
        words = [engine, "run", "-i", "--rm", "--pull", "never", "--name", name, "--label", f"{LABEL}={owner}"]
        process = await _process([*words, *network, *limits, "--entrypoint", "sh", image, *FIRST])
        container = cls(engine, name, process)
        try:
            assert process.stdin is not None and process.stdout is not None
            async with asyncio.timeout(CALL_SECONDS):
                process.stdin.write(b"ready\n")  # cat writes it back once the container runs
                if await process.stdout.readline() == b"ready\n":
                    return container
        except (ConnectionError, TimeoutError):
            pass
        except BaseException:
            await container.close()
            raise
        said = await container._complaint()
        await container.close()
        raise ContainerLost(f"{engine} did not start a container of '{image}': {said}")

    @property
    def is_alive(self) -> bool:
        """Whether its first process runs, as far as the engine has told."""
        return not self._closed and self._process.returncode is None

    async def run(
        self, command: Sequence[str], seconds: float, folder: str | None = None, variables: Mapping[str, str] = {}
    ) -> CommandResult:
        """See `Container`. After the deadline all processes of the container are killed."""
        words = [self._engine, "exec", "-i"]
        for name, value in variables.items():
            words += ["--env", f"{name}={value}"]
        words += ["--workdir", folder] if folder else []
        said = await self._asked([*words, self._name, *command], seconds)
        if said.status is None:
            await self.end_processes()
        ending = CommandEnd.TIME if said.status is None else CommandEnd.EXITED
        return CommandResult(ending, -9 if said.status is None else said.status, said.stdout, said.stderr, said.total)

    async def put(self, files: Mapping[str, ContainerFile]) -> None:
        """See `Container`."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path, file in files.items():
                member = tarfile.TarInfo(path.lstrip("/"))
                if file.mode == LINK:
                    member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(file.content)
                    archive.addfile(member)
                else:
                    member.mode, member.size = file.mode, len(file.content)
                    archive.addfile(member, io.BytesIO(file.content))
        said = await self._asked([self._engine, "cp", "-", f"{self._name}:/"], CALL_SECONDS, packed.getvalue())
        if said.status != 0:
            raise FilesRefused(said.complaint)

    async def get(self, path: str, most: int = MOST_FILES) -> dict[str, ContainerFile]:
        """See `Container`."""
        room = 2 * most + MIB  # the headers of a tar file may be larger than small files
        said = await self._asked([self._engine, "cp", f"{self._name}:{path}", "-"], CALL_SECONDS, most=room)
        if said.status != 0 or said.total > room:
            raise FilesRefused(said.complaint or f"more than {most} bytes")
        found, size, parent = dict[str, ContainerFile](), 0, path.rstrip("/").rpartition("/")[0]
        try:
            with tarfile.open(fileobj=io.BytesIO(said.stdout)) as archive:
                for member in archive:
                    if member.issym():
                        found[f"{parent}/{member.name}"] = ContainerFile(os.fsencode(member.linkname), LINK)
                    elif (member.isreg() or member.islnk()) and (content := archive.extractfile(member)) is not None:
                        file = found[f"{parent}/{member.name}"] = ContainerFile(content.read(), member.mode)
                        size += len(file.content)
        except (tarfile.TarError, KeyError) as error:
            raise FilesRefused(f"{self._engine} wrote no readable tar file: {error}") from error
        if size > most:
            raise FilesRefused(f"more than {most} bytes")
        return found

    async def end_processes(self) -> None:
        """See `Container`."""
        await self._asked([self._engine, "exec", self._name, *KILL_ALL], CALL_SECONDS)

    async def close(self) -> None:
        """See `Container`."""
        if self._closed:
            return
        self._closed = True
        await uninterrupted(self._remove())

    async def _remove(self) -> None:
        await _called([self._engine, "kill", self._name])  # `rm` alone waits 10 s for it to end by itself
        await _called([self._engine, "rm", "-f", self._name])
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _asked(self, words: Sequence[str], seconds: float, given: bytes = b"", most: int = MOST_OUTPUT) -> _Said:
        """Call the engine. Raises ContainerLost if the container is gone; a call that is cancelled closes it."""
        if self._closed:
            raise ContainerLost("the container is closed")
        try:
            said = await _called(words, given, seconds, most)
        except BaseException:
            await self.close()
            raise
        # An exit status may be the engine's or the command's: only the engine knows whether the container runs.
        if said.status not in (0, None) and (said.status == ENGINE_FAILED or not self.is_alive):
            running = await _called([self._engine, "inspect", "--format", "{{.State.Running}}", self._name])
            if running.stdout.strip() != b"true":
                await self.close()
                raise ContainerLost(f"a container of {self._engine} was lost: {said.complaint}")
        return said

    async def _complaint(self) -> str:
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                assert self._process.stderr is not None
                return (await self._process.stderr.read()).decode("utf-8", "replace").strip()[-500:]
        return f"no answer within {CALL_SECONDS:g} s"
