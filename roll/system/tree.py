"""Measures the descendants of a process and their memory on Linux. Cheap enough for a call every second."""

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
    """Bounds on a process and its descendants together."""

    memory_bytes: int
    processes: int

    def exceeded(self, pids: Sequence[int]) -> str:
        """Return how these processes exceed a bound, empty if they do not."""
        if len(pids) > self.processes:
            return f"the process and what it started were {len(pids)} processes; max_processes is {self.processes}"
        if (held := resident_bytes(pids)) > self.memory_bytes:
            return f"the process and what it started held {held / GIB:.2f} GiB; memory_gib is {self.memory_bytes / GIB:g}"
        return ""


def tree(pid: int) -> list[int]:
    """Return a process and its unreaped descendants, including adopted ones."""
    found = [pid]
    for parent in found:  # grows meanwhile
        found += _children(parent)
    return found


def _children(pid: int) -> list[int]:
    """Return the children of a process. Empty also for a kernel without CONFIG_PROC_CHILDREN."""
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += map(int, file.read_text().split())
        except OSError:  # the thread has ended
            continue
    return children


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the memory of all of them in bytes. Shared pages count for each process, except pages of files."""
    total = 0
    for pid in pids:
        try:
            resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
        except OSError:
            continue
        total += (resident - shared) * PAGE_BYTES
    return total
