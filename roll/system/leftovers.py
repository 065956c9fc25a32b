"""Finds and removes the child processes and shared-memory files that killed processes of this host leave behind."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from roll.system.orphans import is_alive
from roll.system.process_start import boot_time, process_start

SHARED_MEMORY = Path("/dev/shm")
CLOCK_SLACK = 0.1
"""Largest error in seconds of a start and of a file's time, which are both counted in ticks of the kernel."""


class Leftovers:
    """The processes of some workers, their child processes, and the shared-memory files that they have open."""

    def __init__(self, record: Path | None = None) -> None:
        """`record` is a file that lists the shared-memory files for a later run, in case this one is killed."""
        self._record = record
        self._processes: set[psutil.Process] = set()
        self._began = math.inf  # the first start of a worker, in seconds since the boot
        self._files: set[Path] = set()
        self._looks = threading.Lock()

    def record(self, pids: Sequence[int]) -> None:
        """Record the current processes and files. Call early and often: a dead process's files cannot be found."""
        with self._looks:
            for pid in pids:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    process = psutil.Process(pid)
                    if any(known.pid == pid and known != process for known in self._processes):
                        continue  # the known process has ended, and another one has got its id
                    self._began = min(self._began, process_start(pid))
                    self._processes |= {process, *process.children(recursive=True)}
            # Files that are older than all of these processes, such as a model that a user keeps in memory, are not
            # theirs.
            began = boot_time() + self._began - CLOCK_SLACK
            there = {facts.st_ino: file for file, facts in _shared_files() if facts.st_ctime >= began}
            for process in filter(psutil.Process.is_running, self._processes):
                self._files |= {there[inode] for inode in _mapped(process.pid) if inode in there}
            if self._files and self._record is not None and self._record.parent.is_dir():
                self._record.write_text("".join(f"{file}\n" for file in sorted(self._files)))

    def remove(self, seconds: float) -> None:
        """Wait `seconds` at most for the processes, and then do the same as `kill`."""
        psutil.wait_procs(list(self._processes), timeout=seconds)
        self.kill(seconds)

    def kill(self, seconds: float) -> None:
        """Kill the processes with their children, wait `seconds` at most for their end, and unlink all files."""
        alive = [process for process in self._processes if is_alive(process)]
        family = set(alive)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                family |= set(process.children(recursive=True))
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=seconds)
        for file in self._files:
            file.unlink(missing_ok=True)


def _shared_files() -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files directly in the folder of shared memory, with their status."""
    for file in SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            yield file, file.stat()


def _mapped(pid: int) -> set[int]:
    """Return the inodes of a process's shared-memory files. Names are not enough, because a semaphore is mapped under
    another name.

    psutil's `memory_maps` is not used because it makes the kernel add up sizes, which takes 10 s per TiB.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended
        return set()
    return {int(line.split(maxsplit=5)[4]) for line in lines if f" {SHARED_MEMORY}/" in line}


def remove_recorded(record: Path) -> None:
    """Unlink the shared-memory files that a killed run recorded."""
    for line in record.read_text().splitlines():
        file = Path(line)
        if file.parent == SHARED_MEMORY:
            file.unlink(missing_ok=True)
