"""Folders that one process has to itself: it locks them while it runs, and later processes remove those of dead ones."""

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
"""File that the owner locks: in another container its process id means nothing."""


@contextmanager
def own_folder(parent: Path | None) -> Iterator[Path]:
    """A new folder in `parent`, or in the system's temporary one, which is removed with all that is in it."""
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    try:
        new = folder / f"{LOCK}.new"
        with locked(new):
            new.rename(folder / LOCK)  # taken before it can be found: one who looked between the two would remove the folder
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ownerless(parent: Path) -> Iterator[Path]:
    """Folders in `parent` whose process was killed before it could remove them; each is the caller's until the next is asked for."""
    for file in parent.glob(f"{PREFIX}[0-9]*-*/{LOCK}"):
        with suppress(FileNotFoundError, PermissionError), file.open("rb") as lock:
            if take(lock):
                yield file.parent


def remove_ownerless(parent: Path) -> None:
    """Remove them with all that is in them."""
    for folder in ownerless(parent):
        shutil.rmtree(folder, ignore_errors=True)
