"""Ends what a killed process leaves: `python -m roll.system.survivors DESCRIPTOR FOLDER`.

The kernel ends the child processes that ask for it, but not theirs. This program waits until the other end of the
descriptor is closed, and then kills all processes that use the killed process's private folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def survivors_ended(folder: Path) -> Iterator[None]:
    """A context in which the death of this process ends the processes that use its private folder; see `end_users`."""
    ends, alive = os.pipe()
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        watching = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(ends), str(folder)],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(ends,),
            start_new_session=True,
        )
    except OSError:
        os.close(alive)
        raise
    finally:
        os.close(ends)
    try:
        yield
    finally:
        watching.kill()
        watching.wait()
        os.close(alive)


def main(descriptor: int, folder: Path) -> None:
    """Wait for the end of the process that started this one, and end what it leaves."""
    while os.read(descriptor, 1):
        pass
    from roll.system.orphans import end_users  # imported only now, so that waiting takes little memory

    end_users(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
