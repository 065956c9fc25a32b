"""Checkpoints of ranks on hosts that do not see the driver's folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from roll.errors import CheckpointError, WorkerFailed
from roll.ray import host_folders
from roll.ray.batching import Ranks
from roll.ray.group import WorkerGroup
from roll.ray.host_folders import HostFolder, HostFolders
from tests import limits


class InThisProcess(Ranks[HostFolder]):
    """The folders of three ranks. Their hosts have the same file system here, but each opens an own folder."""

    def __init__(self) -> None:
        self.folders = [HostFolder() for _ in range(3)]

    def __len__(self) -> int:
        return len(self.folders)

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        return [getattr(self.folders[rank], method)(*given) for rank, given in arguments.items()]


class ThreeHosts:
    """A group with a rank on the driver's host and one on each of two others."""

    def __init__(self, elsewhere: Callable[..., object]) -> None:
        self._elsewhere, self.folders = elsewhere, InThisProcess()

    def __len__(self) -> int:
        return 3

    def host(self, rank: int) -> str:
        return f"10.0.0.{rank}"

    def is_here(self, rank: int) -> bool:
        return rank == 0

    async def ask_hosts(self, question: Callable[..., object], *arguments: Any, seconds: float) -> dict[str, object]:
        return {self.host(rank): self._elsewhere(rank, question, *arguments) for rank in (1, 2)}

    async def colocate(self, make: Any, seconds: float) -> Ranks[HostFolder]:
        return self.folders


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a checkpoint. Pieces of files have 4 bytes."""
    monkeypatch.setattr(host_folders, "PIECE", 4)
    (tmp_path / "step_1").mkdir()
    return tmp_path / "step_1"


def folders(elsewhere: Callable[..., object]) -> HostFolders:
    return HostFolders(cast(WorkerGroup[Any], ThreeHosts(elsewhere)), limits.CALL)


def blind(rank: int, *_: object) -> bool:
    """Let only the host of rank 2 see what the driver sees."""
    return rank == 2


CONTENTS = {"empty": b"", "deepspeed/part": b"123456789", "random": b"1234"}


def write_contents(into: Path) -> None:
    for name, content in CONTENTS.items():
        (into / name).parent.mkdir(exist_ok=True)
        (into / name).write_bytes(content)


def files(below: Path) -> dict[str, bytes]:
    return {
        path.relative_to(below).as_posix(): path.read_bytes() for path in sorted(below.rglob("*")) if path.is_file()
    }


async def save(into: HostFolders, folder: Path, write: Callable[[Path], object]) -> list[Path]:
    async with into.written(folder) as of_ranks:
        write(of_ranks[1])
    return of_ranks


def test_files_of_blind_hosts_arrive_whole(folder: Path) -> None:
    of_ranks = asyncio.run(save(folders(blind), folder, write_contents))
    assert of_ranks[0] == of_ranks[2] == folder != of_ranks[1]
    assert files(folder) == CONTENTS
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing else is left"


def test_folder_that_ranks_create_may_not_exist_yet(folder: Path) -> None:
    asyncio.run(save(folders(blind), folder / "export", write_contents))
    assert files(folder) == {f"export/{name}": content for name, content in CONTENTS.items()}


def test_file_of_two_hosts_is_refused(folder: Path) -> None:
    (folder / "random").write_bytes(b"of the driver")
    with pytest.raises(CheckpointError, match=r"random.* 10\.0\.0\.1 "):
        asyncio.run(save(folders(blind), folder, write_contents))
    assert (folder / "random").read_bytes() == b"of the driver"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_failed_save_leaves_nothing_elsewhere(folder: Path) -> None:
    def fail(into: Path) -> None:
        write_contents(into)
        raise WorkerFailed("actor_train", 1, "no space")

    with pytest.raises(WorkerFailed, match="no space"):
        asyncio.run(save(folders(blind), folder, fail))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name] and not files(folder)


@pytest.mark.parametrize("there", ["absent", "stale", "equal"])
def test_host_reads_the_drivers_files(there: str, folder: Path) -> None:
    write_contents(folder)

    def prints(rank: int, question: Callable[[str], dict[str, str]], path: str) -> dict[str, str]:
        own = question(path)
        return own if rank == 2 or there == "equal" else {"random": "4 bytes, 0"} if there == "stale" else {}

    async def load() -> tuple[list[Path], dict[str, bytes]]:
        async with folders(prints).brought(folder) as of_ranks:
            return of_ranks, files(of_ranks[1])

    of_ranks, read = asyncio.run(load())
    assert of_ranks[0] == of_ranks[2] == folder and read == CONTENTS
    assert (of_ranks[1] == folder) is (there == "equal")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_created_parents_are_removed_unless_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    opened = HostFolder()
    opened.open(tmp_path / "run" / "checkpoints" / ".step_1.partial-0")
    (tmp_path / "run" / "checkpoints" / "other").touch()
    opened.close()
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["checkpoints", "other"]
