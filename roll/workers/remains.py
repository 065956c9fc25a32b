"""What the processes of this host leave behind when they are ended, and its removal."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
CLOCK_SLACK = 1.0
"""Seconds by which the start of a process, counted from the machine's, may seem later than it was."""


class Remains:
    """The processes of some workers, all that they started, and the shared-memory files that they hold open."""

    def __init__(self, record: Path) -> None:
        """`record` names the files for a later run to remove, should this one be killed before it can."""
        self._record = record
        self._processes: set[psutil.Process] = set()
        self._files: set[Path] = set()
        self._looks = threading.Lock()

    def look(self, pids: Sequence[int]) -> None:
        """Note what there is now. Once a process is gone, nothing says any more what was its own: look early, and again."""
        with self._looks:
            for pid in pids:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    self._processes |= {process, *process.children(recursive=True)}
            for process in self._processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._files |= self._shared_by(process)
            if self._files and self._record.parent.is_dir():
                self._record.write_text("".join(f"{file}\n" for file in sorted(self._files)))

    def _shared_by(self, process: psutil.Process) -> set[Path]:
        """Shared memory that the process maps and that came to be since the first of all these processes did.

        Shared memory lies in the folder itself. What else is there and mapped, such as a model that somebody keeps in memory, is
        not the run's.
        """
        began = min(each.create_time() for each in self._processes) - CLOCK_SLACK
        mapped = {Path(region.path) for region in process.memory_maps()}
        return {file for file in mapped if file.parent == SHARED_MEMORY and _changed_at(file) >= began}

    def remove(self, seconds: float) -> None:
        """Wait for the processes to end for at most `seconds`, end those that do not and what they have started, and unlink their files."""
        _, alive = psutil.wait_procs(list(self._processes), timeout=seconds)
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


def _changed_at(file: Path) -> float:
    """Seconds of the epoch; before all time for a file that is gone."""
    try:
        return file.stat().st_ctime
    except FileNotFoundError:
        return -math.inf


def remove_recorded(record: Path) -> None:
    """Unlink the shared-memory files that a run recorded, which was killed."""
    for line in record.read_text().splitlines():
        file = Path(line)
        if file.parent == SHARED_MEMORY:
            file.unlink(missing_ok=True)
