"""No process outlives the one that started it, however that ends."""

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
"""A killed process is gone at once, unless the kernel itself is stuck."""
LOOK_SECONDS = 0.05
"""Seconds between two checks for processes that were started meanwhile."""


def die_with(parent: int) -> None:
    """Ask Linux for a SIGKILL when the thread that started this process ends, so that not even what hangs outlives it."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this was ready
        os._exit(1)


def adopt_orphans() -> None:
    """Ask Linux to make orphans among the descendants of this process its own children, so that its parent finds them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


@contextmanager
def forks_die_too() -> Iterator[None]:
    """What is forked within ends with this process. Otherwise it would wait for ever, with all locks that were held as it was forked."""
    parent = forking = os.getpid()
    is_within = True

    def note() -> None:
        nonlocal forking
        forking = os.getpid()

    def bind() -> None:
        if is_within and forking == parent:  # not what a child forks in its turn
            die_with(parent)

    os.register_at_fork(before=note, after_in_child=bind)  # for good: afterwards they do nothing
    try:
        yield
    finally:
        is_within = False


def end_descendants() -> None:
    """Kill all that this process started, and what that started, in whatever process group it is; `adopt_orphans` before it.

    What is started meanwhile is killed, too. Returns when none is left, or after END_SECONDS.
    """
    deadline = time.monotonic() + END_SECONDS
    while (left := [one for one in psutil.Process().children(recursive=True) if is_alive(one)]) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=LOOK_SECONDS)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that was killed is there until its parent asks for its status."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
