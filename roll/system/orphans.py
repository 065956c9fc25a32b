"""Ends processes together with the process that started them, however that process ends."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
END_SECONDS = 10.0
"""Deadline in seconds for the exit of killed processes. They exit at once unless the kernel itself is stuck."""
LOOK_SECONDS = 0.05
"""Seconds between two checks for new processes."""


def die_with(parent: int) -> None:
    """Make Linux send SIGKILL to this process when the thread that started it ends, even if it hangs."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before this call
        os._exit(1)


def adopt_orphans() -> None:
    """Make Linux turn orphaned descendants of this process into its children, so that they can be found."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


@contextmanager
def forks_die_too() -> Iterator[None]:
    """A context in which forked processes are bound to this process and end with it.

    Otherwise they could hang forever in locks that were held at the fork.
    """
    parent = forking = os.getpid()
    is_within = True

    def note() -> None:
        nonlocal forking
        forking = os.getpid()

    def bind() -> None:
        if is_within and forking == parent:  # not in grandchildren
            die_with(parent)

    # They cannot be unregistered, but do nothing outside the block.
    os.register_at_fork(before=note, after_in_child=bind)
    try:
        yield
    finally:
        is_within = False


def end_descendants() -> None:
    """Kill all descendants of this process, in any process group. Call `adopt_orphans` first.

    Processes that start meanwhile are killed as well. Return when no descendant is left, or after END_SECONDS.
    """
    deadline = time.monotonic() + END_SECONDS
    while (
        left := [one for one in psutil.Process().children(recursive=True) if is_alive(one)]
    ) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=LOOK_SECONDS)


def end_marked(variable: str, value: str) -> None:
    """Kill all processes that were started with an environment variable of this value, and those of their sessions.

    The first of them must have led a new session. Unlike a process's place in the tree, its variables stay when its
    parents end. Return when no such process is left, or after END_SECONDS.
    """
    entry = f"{variable}={value}".encode()

    def found() -> set[int]:
        sessions, marked = dict[int, int](), set[int]()
        for pid in psutil.pids():
            with suppress(OSError):  # it ended, or is another user's
                sessions[pid] = os.getsid(pid)
                if entry in _environment(pid):
                    marked.add(pid)
        within = {sessions[pid] for pid in marked} - {os.getsid(0)}
        return marked | {pid for pid, session in sessions.items() if session in within}

    _end_all(found)


def end_users(folder: Path) -> None:
    """Kill all processes that have a file in a private folder open for writing, or have a path there in a variable.

    A process that changed its title, such as one of Ray's agents, has no readable variables. Return when no such
    process is left, or after END_SECONDS.
    """
    there = f"{folder}/".encode()

    def is_user(pid: int) -> bool:
        with suppress(OSError):  # it ended, or is another user's
            values = [entry.partition(b"=")[2] + b"/" for entry in _environment(pid)]
            return any(path.startswith(there) for path in (*values, *_written(pid)))
        return False

    _end_all(lambda: set(filter(is_user, psutil.pids())))


def _written(pid: int) -> Iterator[bytes]:
    """Yield the paths of the files that a process has open for writing. Linux shows that in a descriptor's mode."""
    for link in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if link.stat(follow_symlinks=False).st_mode & stat.S_IWUSR:
                yield os.readlink(link.path).encode()


def _environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def _end_all(find: Callable[[], set[int]]) -> None:
    """Kill the processes that are found, except this one, until none is left."""
    deadline = time.monotonic() + END_SECONDS
    while (left := _alive(find() - {os.getpid()})) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=LOOK_SECONDS)


def _alive(pids: Iterable[int]) -> list[psutil.Process]:
    found = list[psutil.Process]()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return list(filter(is_alive, found))


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process exists and is not a zombie, as a killed one is until its parent reaps it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_stopped(pid: int) -> bool:
    """Return whether a process exists and was stopped by SIGSTOP."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
