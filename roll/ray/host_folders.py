"""Files of ranks on hosts that do not see the driver's folder: they travel through Ray, in pieces.

    written:  ranks elsewhere write into a folder of their host  -->  its files are copied to the driver's  -->  removed
    brought:  the driver's files are copied to a folder of each host that lacks them  -->  ranks read  -->  removed

The folder of a host belongs to one of the processes there: if that dies, the host's `Caretaker` removes it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from roll.backend import Rank
from roll.errors import CheckpointError, RollError
from roll.models.prints import model_print
from roll.ray.batching import Calls, Ranks
from roll.ray.device_sharing import run_together
from roll.ray.group import WorkerGroup
from roll.system.own_folder import own_folder, remove_ownerless

PIECE = 64 << 20
"""Bytes of a file that are in memory at a time, for each host."""
AFTER_FAILURE_SECONDS = 10.0
"""Deadline for removing the folders after a failure, which may have been that of a host."""


class HostFolder:
    """A folder on the host of one process, in place of one of the driver's."""

    def __init__(self) -> None:
        self._held = ExitStack()
        self._folder = Path()

    def open(self, parent: Path) -> Path:
        """Return a new folder in `parent`, which is created if it is not there. It lasts until `shut`."""
        self.shut()
        new = [path for path in (parent, *parent.parents) if not path.exists()]
        parent.mkdir(parents=True, exist_ok=True)
        for path in reversed(new):
            self._held.callback(_remove_empty, path)
        remove_ownerless(parent)
        self._folder = self._held.enter_context(own_folder(parent)) / "files"
        self._folder.mkdir()
        return self._folder

    def sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of the folder's files, by their path in it."""
        files = (path for path in sorted(self._folder.rglob("*")) if path.is_file())
        return {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in files}

    def read(self, name: str, start: int) -> bytes:
        """Return at most `PIECE` bytes of a file."""
        return read_piece(self._folder / name, start)

    def write(self, name: str, piece: bytes) -> None:
        """Append to a file."""
        append_piece(self._folder / name, piece)

    def shut(self) -> None:
        """Remove the folder, and the parents that `open` created, as far as nothing else is in them."""
        self._held.close()

    def close(self) -> None:
        """Do what `shut` does, when the process ends."""
        self.shut()


def read_piece(path: Path, start: int) -> bytes:
    """Return at most `PIECE` bytes of a file."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(PIECE)


def append_piece(path: Path, piece: bytes) -> None:
    """Append to a file, which is created if it is not there, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(piece)


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # something else is in it by now
        return


def host_folder(strategy: object, rank: Rank) -> HostFolder:
    """Return the folder of one rank's process, for `colocate`."""
    return HostFolder()


async def hosts_without(group: WorkerGroup[Any], folder: Path, seconds: float) -> list[str]:
    """Return the addresses of the hosts with ranks of a group that do not see an existing folder of the driver.

    Raises:
        WorkerFailed: a host failed, or did not answer within `seconds`.
    """
    mark = folder.absolute() / f".seen-{secrets.token_hex(8)}"
    mark.touch()
    try:
        seen = await group.ask_hosts(os.path.exists, str(mark), seconds=seconds)
    finally:
        mark.unlink(missing_ok=True)
    return [host for host, sees in seen.items() if not sees]


class HostFolders:
    """The folders of a group's hosts other than the driver's."""

    def __init__(self, group: WorkerGroup[Any], seconds: float) -> None:
        """`seconds`: deadline of each piece."""
        self._group, self._seconds = group, seconds
        self._folders: Ranks[HostFolder] | None = None

    @asynccontextmanager
    async def written(self, folder: Path) -> AsyncIterator[list[Path]]:
        """Yield the folder that each rank has to write into, `folder` itself on hosts that see it or its parent. At the
        end, `folder` has the files of all hosts.

        Raises:
            CheckpointError: two hosts wrote the same file.
            WorkerFailed: a host failed, or did not answer in time.
        """
        existing = folder if folder.is_dir() else folder.parent
        blind = self._firsts(await hosts_without(self._group, existing, self._seconds))
        async with self._opened(folder.parent, blind) as opened:
            yield self._of_ranks(folder, opened)
            await run_together(self._collect(rank, folder) for rank in blind.values())

    @asynccontextmanager
    async def brought(self, folder: Path) -> AsyncIterator[list[Path]]:
        """Yield the folder that each rank has to read: `folder` itself on hosts where its files are the driver's.

        Raises:
            WorkerFailed: a host failed, lacks space, or did not answer in time.
        """
        lacking = self._firsts(await self._lacking(folder))
        async with self._opened(folder.parent, lacking) as opened:
            await run_together(self._send(rank, folder) for rank in lacking.values())
            yield self._of_ranks(folder, opened)

    def _firsts(self, hosts: Collection[str]) -> dict[str, int]:
        """The first rank on each of these hosts."""
        ranks = reversed(range(len(self._group)))
        return {self._group.host(rank): rank for rank in ranks if self._group.host(rank) in hosts}

    async def _on(self) -> Calls[HostFolder]:
        if self._folders is None:
            self._folders = await self._group.colocate(host_folder, self._seconds)
        return self._folders.within(self._seconds)

    async def _lacking(self, folder: Path) -> list[str]:
        there = await self._group.ask_hosts(model_print, str(folder.absolute()), seconds=self._seconds)
        own = await asyncio.to_thread(model_print, str(folder.absolute())) if there else {}
        return [host for host, prints in there.items() if prints != own]

    @asynccontextmanager
    async def _opened(self, parent: Path, hosts: Mapping[str, int]) -> AsyncIterator[dict[str, Path]]:
        """Open a folder on each host, and remove it at the end."""
        if not hosts:
            yield {}
            return
        on = await self._on()
        try:
            opened = await run_together(on.one(rank, HostFolder.open, parent.absolute()) for rank in hosts.values())
            yield dict(zip(hosts, opened, strict=True))
        except BaseException:
            assert self._folders is not None
            with suppress(
                RollError
            ):  # what ended the block is reported; of hosts that died, the `Caretaker` takes care
                await self._shut(self._folders.within(AFTER_FAILURE_SECONDS), hosts)
            raise
        await self._shut(on, hosts)

    async def _shut(self, on: Calls[HostFolder], hosts: Mapping[str, int]) -> None:
        await run_together(on.one(rank, HostFolder.shut) for rank in hosts.values())

    def _of_ranks(self, folder: Path, opened: Mapping[str, Path]) -> list[Path]:
        group = self._group
        return [folder if group.is_here(rank) else opened.get(group.host(rank), folder) for rank in range(len(group))]

    async def _collect(self, rank: int, folder: Path) -> None:
        on = await self._on()
        for name, size in (await on.one(rank, HostFolder.sizes)).items():
            if (folder / name).exists():
                host = self._group.host(rank)
                raise CheckpointError(
                    f"{folder / name}: host {host} wrote this file, too; put output_dir on storage that all hosts mount"
                )
            for start in range(0, max(size, 1), PIECE):
                piece = await on.one(rank, HostFolder.read, name, start)
                await asyncio.to_thread(append_piece, folder / name, piece)

    async def _send(self, rank: int, folder: Path) -> None:
        on = await self._on()
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            for start in range(0, max(path.stat().st_size, 1), PIECE):
                piece = await asyncio.to_thread(read_piece, path, start)
                await on.one(rank, HostFolder.write, path.relative_to(folder).as_posix(), piece)
