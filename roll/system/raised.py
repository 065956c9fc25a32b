"""Describes an exception of the user's code, with the place in that code that raised it."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

NOTE_CHARACTERS = 300
PACKAGE = Path(__file__).parents[1]
INSTALLED = tuple(f"{path}/" for path in (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), PACKAGE))


def raised_where(error: BaseException, caller: str) -> str:
    """Return the exception with file and line, in at most NOTE_CHARACTERS. `caller` is the file that called the user's code."""
    lines = traceback.format_exception_only(error)  # an indented place precedes a SyntaxError, and notes follow it
    said = next(line for line in lines if not line.startswith(" ")).strip()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != caller]
    own = [frame for frame in frames if not frame.filename.startswith(INSTALLED)]
    # If the user's code is an installed package, its first file counts as its own.
    place = next(reversed(own or [frame for frame in frames if frame.filename == frames[0].filename]), None)
    where = f" ({place.filename}, line {place.lineno})" if place else ""
    if isinstance(error, MemoryError):
        where += "; memory_gib of the domain bounds what its process may allocate"
    return said[: NOTE_CHARACTERS - len(where)] + where
