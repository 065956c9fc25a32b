"""Locks in torch's cache of compiled extensions, such as DeepSpeed's ops. One process compiles at a time, and no lock outlives its owner.

torch locks an extension's folder by creating the file `lock` in it (`torch.utils.file_baton`). It keeps the file open and removes it at
the end. A process that is killed leaves the file, and every later one waits for it without a deadline. The file names no owner: this module
finds the process that has it open.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from roll.system.locks import LockHeld, locked
from roll.system.signs import enter

LOG = logging.getLogger(__name__)

LOCK = "lock"
"""Name of torch's lock file."""
TURN = "roll_deepspeed_ops.lock"
"""File in the cache that roll's processes lock by `roll.system.locks` before they compile. The lock ends with its process."""
OWNER = "roll_owner"
"""File in an extension's folder with the host and the process of roll that compiles there."""
LONGEST_COMPILATION = 3600.0
"""Seconds. Nobody compiles in a folder that has not changed for so long, even if not all processes are visible."""
REMEDY = "end that process if it hangs; if it is gone, remove the file, which roll does itself once its folder has not changed for an hour"
SILENCE = 5.0
"""Seconds of waiting for another process of roll before the wait is logged."""
POLL = 0.5
"""Seconds between two checks of a lock that another process holds."""
LONGEST_COMMAND = 120
"""Number of characters of a command that messages show."""
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "ramfs", "overlay"}
"""File systems that no other host can write to."""
FIRST_NAMESPACE = "pid:[4026531836]"
"""The kernel's first process namespace (`PROC_PID_INIT_INO`), in which all processes of the host are seen."""


@dataclass(frozen=True)
class ExtensionLock:
    """A file `lock` in the cache."""

    path: Path
    holder: str | None
    """The compiling process, as `process 4711 (ninja -v)`. None if it has ended."""

    def __str__(self) -> str:
        return f"{self.holder} holds {self.path}" if self.holder else f"{self.path} was left by a process that is gone"


def extension_cache() -> Path:
    """Return the folder below which torch compiles extensions."""
    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"


def extension_locks(cache: Path) -> list[ExtensionLock]:
    """Return all locks of a cache, with and without a holder."""
    paths = sorted(path for pattern in (f"*/{LOCK}", f"*/*/{LOCK}") for path in cache.glob(pattern) if path.is_file())
    return [lock for lock in map(examine, paths) if lock]


def examine(path: Path) -> ExtensionLock | None:
    """Return the holder of a lock, None if there is no such file.

    A process of another host, container or user cannot be seen. Where one may have made the file, it is taken to hold the lock until
    nothing in the folder has changed for LONGEST_COMPILATION.
    """
    try:
        lock = path.stat()
    except FileNotFoundError:
        return None
    if holders := _holders(path, lock):
        return ExtensionLock(path, ", ".join(holders))
    place, owner = _recorded(path.parent)
    if lock.st_uid == os.geteuid() and (place == _place() if place else _is_private(path)):
        return ExtensionLock(path, None)
    if time.time() - _last_change(path.parent) > LONGEST_COMPILATION:
        return ExtensionLock(path, None)
    unseen = f"{owner} on {place}" if place else "a process of another host, container or user, which cannot be seen from here,"
    return ExtensionLock(path, unseen)


@contextmanager
def turn_to_compile(folder: Path, seconds: float, who: str) -> Iterator[None]:
    """Let only this process compile in an extension's folder of the cache. A lock that a dead process left there is removed.

    `who` is this process in what is logged.

    Raises:
        TimeoutError: another process compiles and was not done within `seconds`; it is named.
    """
    cache = extension_cache()
    cache.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    with ExitStack() as held:
        try:
            held.enter_context(locked(cache / TURN, min(SILENCE, seconds)))
        except LockHeld:
            _tell(who, folder.name, _at_work(cache))
            try:
                held.enter_context(locked(cache / TURN, max(0.0, deadline - time.monotonic())))
            except LockHeld:
                raise TimeoutError(f"{who} waited {seconds:.0f} s to compile {folder.name}: {_at_work(cache)}") from None
        _wait_for_release(folder / LOCK, deadline, seconds, who)
        owner = folder / OWNER
        owner.write_text(f"{_place()}\n{_described(psutil.Process())}\n", encoding="utf-8")
        try:
            yield
        finally:
            owner.unlink(missing_ok=True)


def _wait_for_release(path: Path, deadline: float, seconds: float, who: str) -> None:
    """Wait until nobody holds a lock and its file is gone."""
    named = None
    while lock := examine(path):
        if lock.holder is None:
            path.unlink(missing_ok=True)
            LOG.warning("%s removed a lock: %s", who, lock)
            continue
        if lock.holder != named:
            _tell(who, path.parent.name, str(lock))
            named = lock.holder
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{who} waited {seconds:.0f} s to compile {path.parent.name}: {lock}; {REMEDY}")
        time.sleep(POLL)


def _tell(who: str, extension: str, holder: str) -> None:
    """Report a wait in the log and as the stage of this process."""
    LOG.warning("%s waits to compile %s: %s", who, extension, holder)
    enter(f"waiting to compile {extension}: {holder}")


def _at_work(cache: Path) -> str:
    """Return the op that another process of roll compiles at present."""
    locks = "; ".join(str(lock) for lock in extension_locks(cache) if lock.holder)
    return locks or f"another process of roll holds {cache / TURN}"


def _holders(path: Path, lock: os.stat_result) -> list[str]:
    """Return the visible processes that hold a lock."""
    holders = []
    for process in psutil.process_iter():
        try:
            if _has_open(process, lock) or _builds_in(process, path.parent):
                holders.append(_described(process))
        except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
            continue  # it has ended
        except (PermissionError, psutil.AccessDenied):
            continue  # another user's, or one such as ssh-agent that lets nobody look into it; an interpreter of this user does
    return holders


def _has_open(process: psutil.Process, lock: os.stat_result) -> bool:
    descriptors = f"/proc/{process.pid}/fd"
    return any(_leads_to(f"{descriptors}/{number}", LOCK, lock) for number in os.listdir(descriptors))


def _builds_in(process: psutil.Process, folder: Path) -> bool:
    """Whether a process is the build tool. It may outlive the process that started it, and does not have the lock open."""
    return process.name() == "ninja" and _leads_to(f"/proc/{process.pid}/cwd", folder.name, folder.stat())


def _leads_to(link: str, name: str, file: os.stat_result) -> bool:
    """Whether a link of /proc leads to a file. Only files of that name are checked: on a dead network mount `stat` never returns."""
    try:
        return Path(os.readlink(link)).name == name and os.path.samestat(os.stat(link), file)
    except FileNotFoundError:  # closed, or removed
        return False


def _described(process: psutil.Process) -> str:
    command = " ".join(" ".join(process.cmdline()).split())
    return f"process {process.pid} ({command[:LONGEST_COMMAND] or process.name()})"


def _place() -> str:
    """Return a name of this host and its process namespace. Processes of the same place see each other."""
    return f"{socket.gethostname()}, {os.readlink('/proc/self/ns/pid')}"


def _recorded(folder: Path) -> tuple[str, str]:
    """Return place and description of the last process of roll that did not finish compiling here; empty if there is none."""
    try:
        place, _, owner = (folder / OWNER).read_text(encoding="utf-8").strip().partition("\n")
    except FileNotFoundError:
        return "", ""
    return place, owner


def _is_private(path: Path) -> bool:
    """Whether no process of another host or container can reach a file."""
    file = path.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if file.is_relative_to(mount.mountpoint)]
    mount = max(reversed(mounts), key=lambda mount: len(mount.mountpoint), default=None)  # of several on one folder the last one counts
    if mount is None or mount.fstype not in LOCAL:
        return False
    return mount.mountpoint == "/" or os.readlink("/proc/self/ns/pid") == FIRST_NAMESPACE


def _last_change(folder: Path) -> float:
    """Seconds of the epoch."""
    changes = [folder.stat().st_mtime]
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            changes.append(entry.stat().st_mtime)
    return max(changes)
