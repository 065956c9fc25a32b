"""Finds the descendants of a process and measures their memory on Linux. Cheap enough to be called twice a second.

Finds processes of this host that are gone or stopped, according to the kernel, and kills processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from roll.system.sizes import GIB

PROC = Path("/proc")


class Problem(StrEnum):
    """Why a process does not run."""

    GONE = "is gone"
    STOPPED = "is stopped (SIGSTOP)"


@dataclass(frozen=True)
class ProcessFinding:
    """A process that does not run."""

    problem: Problem
    pid: int
    """Id of the process itself, or of a stopped descendant if the process itself runs."""


@dataclass(frozen=True)
class _Process:
    state: str
    parent: int


def find_stopped(pids: Mapping[int, bool]) -> dict[int, ProcessFinding]:
    """Return findings about stopped and ended processes, by process id. Running processes have none.

    `pids` maps each process to whether its stopped descendants count as well. Ended descendants never count.
    Processes in a debugger (state t), in uninterruptible sleep (D) or waiting for a CPU (R) count as running.
    """
    processes = _processes()
    found = {}
    for pid in pids:
        process = processes.get(pid)
        if process is None or process.state in "ZX":
            found[pid] = ProcessFinding(Problem.GONE, pid)
        elif process.state == "T":
            found[pid] = ProcessFinding(Problem.STOPPED, pid)
    for pid, process in processes.items():
        if process.state == "T" and pid not in pids:
            for ancestor in _ancestors(pid, processes):
                if pids.get(ancestor):
                    found.setdefault(ancestor, ProcessFinding(Problem.STOPPED, pid))
    return found


def end_family(pid: int) -> None:
    """Kill a process and its descendants, even if they are stopped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def _ancestors(pid: int, processes: Mapping[int, _Process]) -> list[int]:
    """Return the ancestors of a process, nearest first, once each: reused process ids may form a cycle."""
    found: list[int] = []
    while (process := processes.get(pid)) is not None and process.parent not in found:
        pid = process.parent
        found.append(pid)
    return found


def _processes() -> dict[int, _Process]:
    """Return all visible processes by id, each read once: psutil's `children` would read all at every call."""
    found = {}
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError, ValueError):  # it ended before or while it was read
                # Split after the name, which may contain any characters. The next fields are the state and the parent.
                state, parent, *_ = (folder / "stat").read_bytes().rpartition(b")")[2].split(maxsplit=2)
                found[int(folder.name)] = _Process(state.decode(), int(parent))
    return found


PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

LOOK_EVERY = 0.5
"""Seconds between two checks of a bounded process tree."""
STOPPED_LOOKS = 24
"""Consecutive checks that must find a process stopped. A count, not a time, as Ctrl-Z stops the checks too."""


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


def end_beneath(pid: int) -> None:
    """Kill the descendants of a process that reaps them and then ends; the process itself if it has none.

    If it were killed first, its descendants could become children of this process, and nobody would reap them.
    """
    first, *beneath = tree(pid)
    for one in beneath or [first]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    """Return the children of a process. A kernel without CONFIG_PROC_CHILDREN reports none."""
    children: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return children


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the anonymous memory of processes in bytes. Pages shared after a fork count for each of them."""
    total = 0
    for pid in pids:
        try:
            resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
        except OSError:
            continue
        total += (resident - shared) * PAGE_BYTES
    return total
