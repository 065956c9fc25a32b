"""Removes what killed workers of a run leave on a host without its driver: `python -m roll.system.caretaker ...`.

On the driver's host, the driver does this itself. On others it cannot after a host was cut off or frozen for so long
that Ray took it for dead: Ray then kills the workers there, but not what they have started, nor their files. So a small
process on each of these hosts looks after them. It ends when they have, however whoever started it ends.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

EVERY = 1.0
"""Seconds between two looks for ended workers."""
RECORD_EVERY = 10
"""Looks between two records of a worker's child processes and files, after the first RECORD_EVERY looks."""
EXIT_SECONDS = 5.0
"""Time in seconds that child processes have to exit before they are killed."""


class Caretaker:
    """The process that looks after the workers on this host, seen from the one that tells it their process ids."""

    def __init__(self, temporary: Path) -> None:
        """`temporary` is the parent of the workers' temporary folders; see `own_folder`."""
        end, self._told = os.pipe()
        self._known: set[int] = set()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # By a shell that ends at once: Ray kills the child processes of a worker, and its process group.
        words = ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-P", "-m", __name__, str(end), str(temporary)]
        try:
            subprocess.run(
                words,
                env={**os.environ, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(end,),
                start_new_session=True,
                check=True,
            )
        finally:
            os.close(end)

    def watch(self, pids: Collection[int]) -> None:
        """Look after these processes as well, until they end."""
        new = "".join(f"{pid}\n" for pid in sorted(set(pids) - self._known))
        self._known = set(pids)  # without ended ones, as another worker may get their ids
        with suppress(BrokenPipeError):  # someone has killed it; the run goes on
            if new:
                os.write(self._told, new.encode())

    def close(self) -> None:
        """Tell of no more processes."""
        os.close(self._told)


def main(descriptor: int, temporary: Path) -> None:
    """Look after the processes whose ids are read from a descriptor, until all have ended and no more can come."""
    import psutil  # imported only in the process of its own

    from roll.system.leftovers import Leftovers
    from roll.system.own_folder import parents_of, remove_ownerless

    def is_alive(worker: psutil.Process) -> bool:
        try:
            return worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:  # it ended between the two questions
            return False

    kept: dict[psutil.Process, Leftovers] = {}
    looks, is_open, parents = dict[psutil.Process, int](), True, {temporary}
    while is_open or kept:
        if select.select([descriptor] if is_open else [], [], [], EVERY)[0]:
            said = os.read(descriptor, select.PIPE_BUF)
            is_open = bool(said)
            for word in said.split():
                with suppress(psutil.NoSuchProcess):
                    kept.setdefault(psutil.Process(int(word)), Leftovers())
        for worker, leftovers in list(kept.items()):
            if is_alive(worker):
                parents |= parents_of(worker.pid)
                looks[worker] = looks.get(worker, -1) + 1
                if looks[worker] < RECORD_EVERY or looks[worker] % RECORD_EVERY == 0:
                    leftovers.record([worker.pid])
            else:
                leftovers.remove(EXIT_SECONDS)
                del kept[worker]
                for parent in parents:
                    remove_ownerless(parent)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
