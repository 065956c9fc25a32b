"""Private folders of a process, which locks them while it runs. Later processes remove the folders of dead ones."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from roll.system.locks import locked, take

PREFIX = "roll-"
LOCK = ".lock"
"""Name of the file that the owner locks. A process id would be meaningless in another container."""


@contextmanager
def own_folder(parent: Path | None) -> Iterator[Path]:
    """Create a folder in `parent` or the system's temporary folder, and remove it with its contents at the end."""
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    try:
        new = folder / f"{LOCK}.new"
        with locked(new):
            new.rename(folder / LOCK)  # locked before it is visible, otherwise another process could remove the folder in between
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ownerless(parent: Path) -> Iterator[Path]:
    """Yield folders in `parent` whose process was killed. Each is locked for the caller until the next one."""
    for file in parent.glob(f"{PREFIX}[0-9]*-*/{LOCK}"):
        with suppress(FileNotFoundError, PermissionError), file.open("rb") as lock:
            if take(lock):
                yield file.parent


def remove_ownerless(parent: Path) -> None:
    """Remove the folders of killed processes with their contents."""
    for folder in ownerless(parent):
        shutil.rmtree(folder, ignore_errors=True)
