"""Finds the descendants of a process and measures their memory on Linux. Cheap enough to be called twice a second."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.system.sizes import GIB

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

LOOK_EVERY = 0.5
"""Seconds between two checks of a bounded process tree."""


@dataclass(frozen=True)
class TreeBounds:
    """Limits on a process and its descendants together."""

    memory_bytes: int
    processes: int

    def exceeded(self, pids: Sequence[int]) -> str:
        """Return a message if these processes exceed a limit, otherwise ""."""
        if len(pids) > self.processes:
            return f"the process and its descendants were {len(pids)} processes; max_processes is {self.processes}"
        if (held := resident_bytes(pids)) > self.memory_bytes:
            return (
                f"the process and its descendants held {held / GIB:.2f} GiB; memory_gib is {self.memory_bytes / GIB:g}"
            )
        return ""


def tree(pid: int) -> list[int]:
    """Return the ids of a process and its unreaped descendants, including adopted ones."""
    found = [pid]
    for parent in found:  # the list grows during the loop
        found += _children(parent)
    return found


def _children(pid: int) -> list[int]:
    """Return the children of a process. A kernel without CONFIG_PROC_CHILDREN reports none."""
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += map(int, file.read_text().split())
        except OSError:  # the thread has ended
            continue
    return children


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the total anonymous memory of processes in bytes. Pages that processes share after a fork count for each
    of them.
    """
    total = 0
    for pid in pids:
        try:
            resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
        except OSError:
            continue
        total += (resident - shared) * PAGE_BYTES
    return total
