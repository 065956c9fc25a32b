"""The files of a run folder besides its checkpoints, in a store: metrics, configuration, logs, report, export."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from roll.errors import CheckpointError
from roll.runs.checkpoint.store import CHECKPOINTS
from roll.runs.checkpoint.stored import at_once
from roll.runs.checkpointer import EXPORT, EXPORT_MARK
from roll.stores.lease import LEASE
from roll.stores.store import Store
from roll.system.own_folder import PREFIX

RECORD = ".store.json"
"""File of the local run folder, never uploaded: what it knows of its store."""
UPLOADS = ".uploads"
"""Folder of the local run folder with hard links of the checkpoints that wait for their upload."""
RAYS = Path("logs") / "ray"
"""Ray's own logs: dozens of files that change all the time. They stay on the host."""
OWN = {CHECKPOINTS, UPLOADS, RECORD, LEASE}
Facts = tuple[int, int, int]
"""Inode, size in bytes and time of the last change in nanoseconds."""


class Records:
    """Keeps a store's copy of the records equal to the local ones."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._sent: dict[str, Facts | None] = {}
        """Files of the store that came from this folder. None: it has another state than the local one."""

    def bring(self) -> None:
        """Download all records into the local folder. An export without its mark is incomplete, and left out.

        Raises:
            StoreError: the store failed.
            CheckpointError: the local folder cannot be written.
        """
        names = [name for name in self._store.sizes() if _is_record(name)]
        if f"{EXPORT}/{EXPORT_MARK}" not in names:
            names = [name for name in names if not name.startswith(f"{EXPORT}/")]
        try:
            with TemporaryDirectory(prefix=".brought-", dir=self._folder) as aside:
                for name in names:
                    (Path(aside) / name).parent.mkdir(parents=True, exist_ok=True)
                at_once(lambda name: self._store.get(name, Path(aside) / name), names)
                for name in sorted(names, key=_mark_last):
                    (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.move(Path(aside) / name, self._folder / name)
        except OSError as error:
            raise CheckpointError(
                f"{self._folder}: cannot be written: {error}; free space or fix the folder"
            ) from error
        self._sent = {name: _facts(self._folder / name) for name in names}

    def know(self) -> None:
        """Take the store's files for earlier states of the local ones, which are newer."""
        self._sent = {name: None for name in self._store.sizes() if _is_record(name)}

    def push(self) -> None:
        """Upload the files that changed, and remove those that this folder no longer has. The export's mark is the
        first to go and the last to come.

        Raises:
            StoreError: the store failed.
        """
        local = self._local()
        lost = [name for name in self._sent if name not in local]
        changed = [name for name, facts in local.items() if self._sent.get(name) != facts]
        if any(name.startswith(f"{EXPORT}/") for name in (*lost, *changed)):
            lost.append(f"{EXPORT}/{EXPORT_MARK}")
        self._store.remove(sorted(set(lost), key=_mark_last, reverse=True))
        for name in lost:
            self._sent.pop(name, None)
        for name in sorted({*changed, *(name for name in lost if name in local)}, key=_mark_last):
            self._push(name, local[name])

    def _push(self, name: str, facts: Facts) -> None:
        try:
            self._store.put(self._folder / name, name)
        except Exception:
            if not (self._folder / name).is_file():  # the run has renamed or removed it meanwhile
                return
            raise
        self._sent[name] = facts

    def _local(self) -> Mapping[str, Facts]:
        found = {}
        for folder, folders, files in os.walk(self._folder):
            if Path(folder) == self._folder:
                folders[:] = [name for name in folders if not _is_own(name)]
                files = [name for name in files if not _is_own(name)]
            if Path(folder) == (self._folder / RAYS).parent:
                folders[:] = [name for name in folders if name != RAYS.name]
            for path in (Path(folder) / name for name in files):
                if not path.is_symlink() and path.is_file() and (facts := _facts(path)):
                    found[path.relative_to(self._folder).as_posix()] = facts
        return found


def _is_own(part: str) -> bool:
    """Whether a file or folder at the top of a run folder is no record: checkpoints, and what is being written."""
    return part in OWN or part.startswith((PREFIX, ".brought-")) or part.endswith(".lock")


def _is_record(name: str) -> bool:
    return not _is_own(name.partition("/")[0])


def _mark_last(name: str) -> tuple[bool, str]:
    return name.endswith(f"/{EXPORT_MARK}"), name


def _facts(path: Path) -> Facts | None:
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_ino, seen.st_size, seen.st_mtime_ns
