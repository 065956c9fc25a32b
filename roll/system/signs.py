"""Signs of life of a process: the stage in its log, and the CPU time and memory that the kernel reports for it and its children."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from roll.system.sizes import GIB
from roll.system.tree import resident_bytes, tree

MARK = "[roll stage] "
"""Prefix of a stage in a line of a process's log."""
COMPILERS = {"ninja", "cc1plus", "nvcc", "cicc", "ptxas", "g++", "c++"}
TICKS = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


@dataclass(frozen=True)
class Usage:
    """Resources that processes have used so far."""

    cpu_seconds: float
    resident: int
    """Bytes of memory."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.cpu_seconds + other.cpu_seconds, self.resident + other.resident)

    def __str__(self) -> str:
        return f"{self.cpu_seconds:.1f} s of CPU, {self.resident / GIB:.2f} GiB"


@dataclass(frozen=True)
class Sign:
    """A role's present work."""

    role: str
    stage: str
    usage: Usage | None = None
    """CPU time and memory of its processes, None before they run."""
    progress: str = ""
    """Progress within the stage."""
    is_busy: bool = True
    """Whether it works, or waits for a call."""

    def __str__(self) -> str:
        return f"{self.role}: " + ", ".join(filter(None, (self.stage, self.progress, str(self.usage or ""))))


@dataclass(frozen=True)
class Look:
    """The signs of one process."""

    stage: str | None
    """Latest stage since the previous check, None if it has entered none."""
    end: int
    """Number of bytes of its log that were read."""
    usage: Usage | None
    """None if there is no such process."""
    compiles: bool
    """Whether it runs a compiler."""


def enter(stage: str) -> None:
    """Write this process's new stage to its log, which is its stdout."""
    print(f"{MARK}{stage}", flush=True)


def look(pid: int | None, log: Path, begin: int) -> Look:
    """Read a process's log from byte `begin` on, and ask the kernel about the process and its children, on its own host."""
    stage, end = None, begin
    with suppress(OSError), log.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(begin if begin <= size else 0)  # a log that has grown too long begins anew
        text = stream.read()
        end = stream.tell()
        said = [line.partition(MARK)[2].strip() for line in text.decode(errors="replace").splitlines() if MARK in line]
        stage = said[-1] if said else None
    family = tree(pid) if pid is not None else []
    cpu = cpu_seconds(family)
    usage = None if cpu is None else Usage(cpu, resident_bytes(family))
    return Look(stage, end, usage, any(name in COMPILERS for name in _names(family)))


def cpu_seconds(pids: Iterable[int]) -> float | None:
    """Return user and system time of processes and of their ended children. None if there are no such processes."""
    ticks = list[int]()
    for pid in pids:
        with suppress(OSError, ValueError):  # it has ended
            # The fields after the name, which may contain anything: utime, stime, cutime and cstime are fields 14 to 17 of the line.
            fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
            ticks.append(sum(map(int, fields[11:15])))
    return sum(ticks) / TICKS if ticks else None


def _names(pids: Iterable[int]) -> list[str]:
    names = list[str]()
    for pid in pids:
        with suppress(OSError):
            names.append((PROC / str(pid) / "comm").read_text().strip())
    return names
