"""Private folders of a process, and the file locks that hold them. The kernel releases a lock when the process that
holds it ends for any reason; later processes then remove the folder. No other folder is ever removed: one that takes
another's place is built in a private folder, and what it does not own there is kept under another name.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout, lock_descriptor

LOG = logging.getLogger(__name__)

WITHOUT_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
"""Errors of a file system without locks."""


class LockHeld(Exception):
    """Another process holds the lock."""


@contextmanager
def holding_lock(path: Path, seconds: float = 0.0) -> Iterator[None]:
    """A context that holds the lock of `path`. The file is created if it does not exist, and is not removed.

    On a file system without locks, log a warning and hold nothing.

    Raises:
        LockHeld: another process still held it after `seconds`.
    """
    lock = FileLock(path, timeout=seconds, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise LockHeld(str(path)) from None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        LOG.warning(
            "%s: this file system has no locks, so two processes that use it at the same time go unnoticed", path
        )
    try:
        yield
    finally:
        lock.release()


def try_lock(file: BinaryIO) -> bool:
    """Lock an open file until it is closed. Return False if another process has it, or without file locks."""
    try:
        return lock_descriptor(file.fileno(), blocking=False)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        return False


PREFIX = "roll-"
LOCK = ".lock"
"""Name of the file that the owner locks. A lock is used because a process id would be meaningless in another container.
"""


@contextmanager
def own_folder(parent: Path | None) -> Iterator[Path]:
    """A context with a new folder in `parent`, by default the system's temporary folder, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    try:
        new = folder / f"{LOCK}.new"
        with holding_lock(new):
            # The lock is held before it is visible, so that no other process can remove the folder in between.
            new.rename(folder / LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ownerless(parent: Path) -> Iterator[Path]:
    """Yield the folders in `parent` whose process was killed, each locked until the next one is yielded."""
    for file in parent.glob(f"{PREFIX}[0-9]*-*/{LOCK}"):
        with suppress(FileNotFoundError, PermissionError), file.open("rb") as lock:
            if try_lock(lock):
                yield file.parent


def parents_of(pid: int) -> set[Path]:
    """Return the folders in which a process of this host has own folders, as far as it may be looked at."""
    locks = set[Path]()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                locks.add(Path(os.readlink(entry)))
    return {lock.parents[1] for lock in locks if lock.name == LOCK and lock.parent.name.startswith(PREFIX)}


def remove_ownerless(parent: Path) -> None:
    """Remove the folders in `parent` whose process was killed, with their contents."""
    for folder in ownerless(parent):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A context with a path, next to `out`, of a folder that the caller creates. It is renamed to `out` at the end, or
    removed after an error.

    Raises:
        OSError: the parent of `out` cannot be created or written, or `out` exists and is not empty.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_ownerless(out.parent)
    with own_folder(out.parent) as site:
        folder = site / out.name
        yield folder
        folder.rename(out)


def make_way(path: Path, mark: str) -> None:
    """Remove the folder `path` if it contains the file `mark`, which only its writer puts there.

    Anything else at `path` belongs to the user: it is renamed, with a warning.
    """
    if (path / mark).is_file() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        keep_aside(path)


def keep_aside(path: Path) -> None:
    """Rename a file or folder of the user to `<name>.kept_<n>`, with a warning."""
    kept = next(name for n in count(1) if not os.path.lexists(name := path.with_name(f"{path.name}.kept_{n}")))
    path.rename(kept)
    LOG.warning("%s was not written by this program, or by an earlier version; it is kept as %s", path, kept)
