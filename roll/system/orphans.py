"""Ends processes with the process that started them, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
END_SECONDS = 10.0
"""Seconds. A killed process is gone at once, unless the kernel itself is stuck."""
LOOK_SECONDS = 0.05
"""Seconds between two checks for new processes."""


def die_with(parent: int) -> None:
    """Ask Linux for a SIGKILL when the thread that started this process ends, so that even a hanging process ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before this call
        os._exit(1)


def adopt_orphans() -> None:
    """Ask Linux to make orphaned descendants of this process its children, so that they can be found."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


@contextmanager
def forks_die_too() -> Iterator[None]:
    """End processes that are forked in the block with this process. Otherwise they could hang forever in locks held at the fork."""
    parent = forking = os.getpid()
    is_within = True

    def note() -> None:
        nonlocal forking
        forking = os.getpid()

    def bind() -> None:
        if is_within and forking == parent:  # not grandchildren
            die_with(parent)

    os.register_at_fork(before=note, after_in_child=bind)  # registered for the process's lifetime; they do nothing outside the block
    try:
        yield
    finally:
        is_within = False


def end_descendants() -> None:
    """Kill all descendants of this process, in any process group. Call `adopt_orphans` first.

    New processes are killed, too. Returns when none is left, or after END_SECONDS.
    """
    deadline = time.monotonic() + END_SECONDS
    while (left := [one for one in psutil.Process().children(recursive=True) if is_alive(one)]) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=LOOK_SECONDS)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs. A killed one remains as a zombie until its parent reaps it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
