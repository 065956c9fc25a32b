"""Private folders of a process, which the process locks while it runs. Later processes remove the folders of dead
processes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from roll.system.locks import holding_lock, try_lock

PREFIX = "roll-"
LOCK = ".lock"
"""Name of the file that the owner locks. A lock is used because a process id would be meaningless in another container.
"""


@contextmanager
def own_folder(parent: Path | None) -> Iterator[Path]:
    """A context with a new folder in `parent`, by default the system's temporary folder. The folder is removed at the
    end.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    try:
        new = folder / f"{LOCK}.new"
        with holding_lock(new):
            new.rename(
                folder / LOCK
            )  # the lock is held before it is visible, so that no other process can remove the folder in between
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ownerless(parent: Path) -> Iterator[Path]:
    """Yield the folders in `parent` whose process was killed. Each is locked for the caller until the next one is
    yielded.
    """
    for file in parent.glob(f"{PREFIX}[0-9]*-*/{LOCK}"):
        with suppress(FileNotFoundError, PermissionError), file.open("rb") as lock:
            if try_lock(lock):
                yield file.parent


def remove_ownerless(parent: Path) -> None:
    """Remove the folders in `parent` whose process was killed, with their contents."""
    for folder in ownerless(parent):
        shutil.rmtree(folder, ignore_errors=True)
