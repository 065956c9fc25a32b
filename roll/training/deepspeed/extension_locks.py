"""Locks in torch's cache of compiled extensions, such as DeepSpeed's ops. One process compiles at a time, and stale
locks are removed.

torch locks the folder of an extension by creating the file `lock` in it (`torch.utils.file_baton`). It keeps the file
open and removes it after the compilation. A killed process leaves the file behind, and all later processes wait for it
without a timeout. The file does not record its owner, so this module searches for the process that has it open.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from roll.system.own_folder import LockHeld, holding_lock
from roll.system.signs import announce

LOG = logging.getLogger(__name__)

LOCK = "lock"
"""Name of torch's lock file."""
TURN = "roll_deepspeed_ops.lock"
"""File in the cache that roll's processes lock with `roll.system.own_folder` before they compile. The kernel frees it
when its holder ends.
"""
OWNER = "roll_owner"
"""File in an extension's folder that records the host and the process of roll that compiles there."""
LONGEST_COMPILATION = 3600.0
"""Seconds without a change in a folder after which no process, even an invisible one, compiles there."""
REMEDY = (
    "end that process if it hangs; if it no longer exists, remove the file (roll does so after an hour without changes "
    "in its folder)"
)
SILENCE = 5.0
"""Seconds to wait for another process of roll before the wait is logged."""
POLL = 0.5
"""Seconds between two checks of a lock that another process holds."""
LONGEST_COMMAND = 120
"""Largest number of characters of a command line in messages."""
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "ramfs", "overlay"}
"""Types of file systems to which no other host can write."""
FIRST_NAMESPACE = "pid:[4026531836]"
"""The kernel's initial PID namespace (`PROC_PID_INIT_INO`), in which all processes of the host are visible."""


@dataclass(frozen=True)
class ExtensionLock:
    """A lock file of torch in the cache."""

    path: Path
    holder: str | None
    """Description of the compiling process, such as `process 4711 (ninja -v)`. None if the process has ended."""

    def __str__(self) -> str:
        return f"{self.holder} holds {self.path}" if self.holder else f"{self.path} was left by a process that is gone"


def extension_cache() -> Path:
    """Return the folder in which torch compiles extensions."""
    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"


def extension_locks(cache: Path) -> list[ExtensionLock]:
    """Return all locks in a cache, including stale ones without a holder."""
    paths = sorted(path for pattern in (f"*/{LOCK}", f"*/*/{LOCK}") for path in cache.glob(pattern) if path.is_file())
    return [lock for lock in map(read_lock, paths) if lock]


def read_lock(path: Path) -> ExtensionLock | None:
    """Return a lock with its holder, or None if there is no such file.

    Processes of other hosts, containers or users are not visible. If such a process may have created the file, it
    counts as the holder until the folder has not changed for LONGEST_COMPILATION seconds.
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
    if _now_in(path.parent.parent) - _last_change(path.parent) > LONGEST_COMPILATION:
        return ExtensionLock(path, None)
    unseen = (
        f"{owner} on {place}"
        if place
        else "a process of another host, container or user, which cannot be seen from here,"
    )
    return ExtensionLock(path, unseen)


@contextmanager
def turn_to_compile(folder: Path, seconds: float, who: str) -> Iterator[None]:
    """Ensure that only this process compiles while the block lasts. A stale lock in `folder`, an extension's folder, is
    removed.

    `who` describes this process in log messages and errors.

    Raises:
        TimeoutError: another process was still compiling after `seconds`. The message names that process.
    """
    cache = extension_cache()
    cache.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    with ExitStack() as held:
        try:
            held.enter_context(holding_lock(cache / TURN, min(SILENCE, seconds)))
        except LockHeld:
            _report_wait(who, folder.name, _at_work(cache))
            try:
                held.enter_context(holding_lock(cache / TURN, max(0.0, deadline - time.monotonic())))
            except LockHeld:
                raise TimeoutError(
                    f"{who} waited {seconds:.0f} s to compile {folder.name}: {_at_work(cache)}"
                ) from None
        _wait_for_release(folder / LOCK, deadline, seconds, who)
        owner = folder / OWNER
        owner.write_text(f"{_place()}\n{_described(psutil.Process())}\n", encoding="utf-8")
        try:
            yield
        finally:
            owner.unlink(missing_ok=True)


def _wait_for_release(path: Path, deadline: float, seconds: float, who: str) -> None:
    """Wait until no process holds a lock and its file is removed."""
    named = None
    while lock := read_lock(path):
        if lock.holder is None:
            path.unlink(missing_ok=True)
            LOG.warning("%s removed a lock: %s", who, lock)
            continue
        if lock.holder != named:
            _report_wait(who, path.parent.name, str(lock))
            named = lock.holder
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{who} waited {seconds:.0f} s to compile {path.parent.name}: {lock}; {REMEDY}")
        time.sleep(POLL)


def _report_wait(who: str, extension: str, holder: str) -> None:
    """Report the wait in the log and as the current stage of this process."""
    LOG.warning("%s waits to compile %s: %s", who, extension, holder)
    announce(f"waiting to compile {extension}: {holder}")


def _at_work(cache: Path) -> str:
    """Return a description of the compilation that another process is running."""
    locks = "; ".join(str(lock) for lock in extension_locks(cache) if lock.holder)
    return locks or f"another process of roll holds {cache / TURN}"


def _holders(path: Path, lock: os.stat_result) -> list[str]:
    """Return descriptions of the visible processes that hold a lock or build in its folder."""
    holders = []
    for process in psutil.process_iter():
        try:
            if _has_open(process, lock) or _builds_in(process, path.parent):
                holders.append(_described(process))
        except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
            continue  # the process has ended
        except (PermissionError, psutil.AccessDenied):
            # a process of another user, or a protected one such as ssh-agent, but never a Python process of this user
            continue
    return holders


def _has_open(process: psutil.Process, lock: os.stat_result) -> bool:
    descriptors = f"/proc/{process.pid}/fd"
    return any(_leads_to(f"{descriptors}/{number}", LOCK, lock) for number in os.listdir(descriptors))


def _builds_in(process: psutil.Process, folder: Path) -> bool:
    """Return whether a process is a ninja that builds in the folder. It may outlive its parent, without the lock."""
    return process.name() == "ninja" and _leads_to(f"/proc/{process.pid}/cwd", folder.name, folder.stat())


def _leads_to(link: str, name: str, file: os.stat_result) -> bool:
    """Return whether a link in /proc points to a file. `stat` may hang on a dead mount, so names must match first."""
    try:
        return Path(os.readlink(link)).name == name and os.path.samestat(os.stat(link), file)
    except FileNotFoundError:  # closed, or removed
        return False


def _described(process: psutil.Process) -> str:
    command = " ".join(" ".join(process.cmdline()).split())
    return f"process {process.pid} ({command[:LONGEST_COMMAND] or process.name()})"


def _place() -> str:
    """Return a name for this host and PID namespace. Processes with the same name are visible to each other."""
    return f"{socket.gethostname()}, {os.readlink('/proc/self/ns/pid')}"


def _recorded(folder: Path) -> tuple[str, str]:
    """Return place and description of roll's last process that began to compile here and did not finish, or ""."""
    try:
        place, _, owner = (folder / OWNER).read_text(encoding="utf-8").strip().partition("\n")
    except FileNotFoundError:
        return "", ""
    return place, owner


def _is_private(path: Path) -> bool:
    """Return whether a file is out of reach of other hosts and containers."""
    file = path.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if file.is_relative_to(mount.mountpoint)]
    # If several file systems are mounted on one folder, the last one counts.
    mount = max(reversed(mounts), key=lambda mount: len(mount.mountpoint), default=None)
    if mount is None or mount.fstype not in LOCAL:
        return False
    return mount.mountpoint == "/" or os.readlink("/proc/self/ns/pid") == FIRST_NAMESPACE


def _now_in(cache: Path) -> float:
    """Return the present by the clock that stamps new files in a cache: on a share it may be that of another host."""
    probe = cache / f".clock-{secrets.token_hex(8)}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with suppress(OSError):
            probe.unlink()


def _last_change(folder: Path) -> float:
    """Return the time of the last change in a folder, by the clock that stamps its files."""
    changes = [folder.stat().st_mtime]
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            changes.append(entry.stat().st_mtime)
    return max(changes)
