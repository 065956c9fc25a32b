"""A process that ends when its parent does, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int) -> None:
    """Ask Linux for a SIGKILL when the thread that started this process ends, so that not even what hangs outlives it."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent ended before this process was ready")


def adopt_orphans() -> None:
    """Ask Linux to make orphans among the descendants of this process its own children, so that its parent finds them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
