"""Ends processes together with the process that started them, however that process ends."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
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

    Unlike a process's place in the tree, its variables stay when its parents end. This process's own session is
    excluded. Return when no such process is left, or after END_SECONDS.
    """
    entry, deadline = f"{variable}={value}".encode(), time.monotonic() + END_SECONDS
    while (left := _marked(entry)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=LOOK_SECONDS)


def _marked(entry: bytes) -> list[psutil.Process]:
    """Return the processes with this entry in their environment, and those of their sessions, without zombies."""
    sessions, marked = dict[int, int](), set[int]()
    for pid in psutil.pids():
        with suppress(OSError):  # it ended, or is another user's
            sessions[pid] = os.getsid(pid)
            if entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                marked.add(pid)
    within = {sessions[pid] for pid in marked} - {os.getsid(0)}
    found = list[psutil.Process]()
    for pid, session in sessions.items():
        if pid in marked or session in within:
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
    return [process for process in found if is_alive(process)]


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
