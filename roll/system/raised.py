"""Describes an exception of user code, with the place in that code that raised it."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

NOTE_CHARACTERS = 300
PACKAGE = Path(__file__).parents[1]
INSTALLED = tuple(f"{path}/" for path in (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), PACKAGE))


def raised_where(error: BaseException, caller: str) -> str:
    """Return the exception with file and line, in at most NOTE_CHARACTERS. `caller` is the file that called the user code."""
    lines = traceback.format_exception_only(error)  # for a SyntaxError, an indented place comes first; notes follow the message
    said = next(line for line in lines if not line.startswith(" ")).strip()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != caller]
    own = [frame for frame in frames if not frame.filename.startswith(INSTALLED)]
    # If the user code is an installed package, all frames look installed; then the last frame in its first file is reported.
    place = next(reversed(own or [frame for frame in frames if frame.filename == frames[0].filename]), None)
    where = f" ({place.filename}, line {place.lineno})" if place else ""
    if isinstance(error, MemoryError):
        where += "; memory_gib of the domain limits the memory of its process"
    return said[: NOTE_CHARACTERS - len(where)] + where
