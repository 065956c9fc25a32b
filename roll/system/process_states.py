"""Which processes of this host are gone or stopped, as the kernel tells, and their end."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

PROC = Path("/proc")


class Problem(StrEnum):
    """What keeps a process from going on."""

    GONE = "is gone"
    STOPPED = "is stopped (SIGSTOP)"


@dataclass(frozen=True)
class Finding:
    """A process that does not go on."""

    problem: Problem
    pid: int
    """Process id of the process itself, or of a descendant if the process itself runs."""


@dataclass(frozen=True)
class _Process:
    state: str
    parent: int


def examine(pids: Mapping[int, bool]) -> dict[int, Finding]:
    """Processes that are stopped or gone, by process id; running ones are left out.

    `pids` says of each process whether those that it has started count too: of these one that is stopped is found, not one that ended.
    A process in a debugger (state t), in uninterruptible sleep (D) or without a turn on a CPU (R) goes on.
    """
    processes = _processes()
    found = {}
    for pid in pids:
        process = processes.get(pid)
        if process is None or process.state in "ZX":
            found[pid] = Finding(Problem.GONE, pid)
        elif process.state == "T":
            found[pid] = Finding(Problem.STOPPED, pid)
    for pid, process in processes.items():
        if process.state == "T" and pid not in pids:
            for ancestor in _ancestors(pid, processes):
                if pids.get(ancestor):
                    found.setdefault(ancestor, Finding(Problem.STOPPED, pid))
    return found


def end_family(pid: int) -> None:
    """Kill a process and all that it has started, stopped or not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def _ancestors(pid: int, processes: Mapping[int, _Process]) -> list[int]:
    """Nearest first. A process that ends meanwhile may leave a ring of reused numbers, so none is passed twice."""
    found: list[int] = []
    while (process := processes.get(pid)) is not None and process.parent not in found:
        pid = process.parent
        found.append(pid)
    return found


def _processes() -> dict[int, _Process]:
    """All that this host shows, by id. One read of each: psutil's `children` would read them all for every process that is asked about."""
    found = {}
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError, ValueError):  # it has ended, or ends as it is read
                # Behind the name, which may hold anything: state, parent, ...
                state, parent, *_ = (folder / "stat").read_bytes().rpartition(b")")[2].split(maxsplit=2)
                found[int(folder.name)] = _Process(state.decode(), int(parent))
    return found
