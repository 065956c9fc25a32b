"""No process outlives the one that started it, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


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
