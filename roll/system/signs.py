"""Signs of activity of a process: the stage in its log, and the CPU time and memory of the process and its children."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from roll.system.sizes import GIB
from roll.system.tree import resident_bytes, tree

MARK = "[roll stage] "
"""Prefix of a line in a process's log that announces a new stage."""
COMPILERS = {"ninja", "cc1plus", "nvcc", "cicc", "ptxas", "g++", "c++"}
TICKS = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


@dataclass(frozen=True)
class Usage:
    """CPU time that processes have used so far, and their current memory."""

    cpu_seconds: float
    resident: int
    """Bytes of resident memory."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.cpu_seconds + other.cpu_seconds, self.resident + other.resident)

    def __str__(self) -> str:
        return f"{self.cpu_seconds:.1f} s of CPU, {self.resident / GIB:.2f} GiB"


@dataclass(frozen=True)
class Activity:
    """The current activity of a role."""

    role: str
    stage: str
    usage: Usage | None = None
    """CPU time and memory of the role's processes, None before they run."""
    progress: str = ""
    """Progress within the stage, as text."""
    is_busy: bool = True
    """Whether the role is working; False if it waits for a call."""

    def __str__(self) -> str:
        return f"{self.role}: " + ", ".join(filter(None, (self.stage, self.progress, str(self.usage or ""))))


@dataclass(frozen=True)
class ProcessActivity:
    """The observed activity of one process."""

    stage: str | None
    """Latest stage that the process entered since the previous check, None if it entered none."""
    end: int
    """Position in the log up to which it has been read, in bytes."""
    usage: Usage | None
    """CPU time and memory of the process and its children, None if there is no such process."""
    compiles: bool
    """Whether the process or one of its children is a compiler."""


def announce(stage: str) -> None:
    """Announce a new stage of this process in its log, which is its stdout."""
    print(f"{MARK}{stage}", flush=True)


def process_activity(pid: int | None, log: Path, begin: int) -> ProcessActivity:
    """Read a process's log from byte `begin` on, and query the kernel for its tree. Call on the process's host."""
    stage, end = None, begin
    with suppress(OSError), log.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(begin if begin <= size else 0)  # a log that became too long was emptied
        text = stream.read()
        end = stream.tell()
        said = [line.partition(MARK)[2].strip() for line in text.decode(errors="replace").splitlines() if MARK in line]
        stage = said[-1] if said else None
    family = tree(pid) if pid is not None else []
    cpu = cpu_seconds(family)
    usage = None if cpu is None else Usage(cpu, resident_bytes(family))
    return ProcessActivity(stage, end, usage, any(name in COMPILERS for name in _names(family)))


def cpu_seconds(pids: Iterable[int]) -> float | None:
    """Return the user and system time of processes and their ended children; None if no process exists."""
    ticks = list[int]()
    for pid in pids:
        with suppress(OSError, ValueError):  # the process has ended
            # Split after the name, which may contain any characters. Fields 14 to 17 of the line are utime, stime,
            # cutime and cstime.
            fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
            ticks.append(sum(map(int, fields[11:15])))
    return sum(ticks) / TICKS if ticks else None


def _names(pids: Iterable[int]) -> list[str]:
    names = list[str]()
    for pid in pids:
        with suppress(OSError):
            names.append((PROC / str(pid) / "comm").read_text().strip())
    return names
