"""Finds processes of this host that are gone or stopped, according to the kernel, and kills processes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

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
    """Return the ancestors of a process, nearest first. Each is visited once, because reused process ids may form a
    cycle.
    """
    found: list[int] = []
    while (process := processes.get(pid)) is not None and process.parent not in found:
        pid = process.parent
        found.append(pid)
    return found


def _processes() -> dict[int, _Process]:
    """Return all visible processes of this host by id. Each is read once; psutil's `children` would read all of them at
    every call.
    """
    found = {}
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError, ValueError):  # it ended before or while it was read
                # Split after the name, which may contain any characters. The next fields are the state and the parent.
                state, parent, *_ = (folder / "stat").read_bytes().rpartition(b")")[2].split(maxsplit=2)
                found[int(folder.name)] = _Process(state.decode(), int(parent))
    return found
