"""Describes an exception of user code, with the place in that code that raised it."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

NOTE_CHARACTERS = 300
TRACE_FRAMES, TRACE_CHARACTERS = 4, 2000
"""Largest number of frames and of characters in a trace."""
IMPORT_SYSTEM = "<frozen importlib"
"""Begin of the file names of the frames of Python's import system."""
PACKAGE = Path(__file__).parents[1]
INSTALLED = tuple(
    f"{path}/"
    for path in (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), PACKAGE)
)


def raised_where(error: BaseException, caller: str) -> str:
    """Return the exception with file and line, in at most NOTE_CHARACTERS. `caller` called the user code."""
    # For a SyntaxError, an indented place comes first; notes follow the message.
    lines = traceback.format_exception_only(error)
    said = next(line for line in lines if not line.startswith(" ")).strip()
    place = _place(error, caller)
    where = f" ({place[0]}, line {place[1]})" if place else ""
    if isinstance(error, MemoryError):
        where += "; memory_gib of the domain limits the memory of its process"
    return said[: NOTE_CHARACTERS - len(where)] + where


def is_of_compilation(error: BaseException) -> bool:
    """Return whether a module that was imported is no valid Python. Such an error has a place, but no frame there."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, SyntaxError) and bool(frames) and frames[-1].filename.startswith(IMPORT_SYSTEM)


def _place(error: BaseException, caller: str) -> tuple[str | None, int | None] | None:
    if isinstance(error, SyntaxError) and is_of_compilation(error):
        return error.filename, error.lineno
    frame = next(reversed(_own_frames(error, caller)), None)
    return (frame.filename, frame.lineno) if frame else None


def trace_of(error: BaseException, caller: str) -> str:
    """Return the user code's last frames and the exception, in at most TRACE_CHARACTERS, as `raised_where`."""
    said = "".join(traceback.format_exception_only(error)).rstrip()[:NOTE_CHARACTERS]
    frames = "".join(traceback.format_list(_own_frames(error, caller)[-TRACE_FRAMES:]))
    return frames[-(TRACE_CHARACTERS - len(said)) :] + said


def _own_frames(error: BaseException, caller: str) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    begin = max((index + 1 for index, frame in enumerate(frames) if frame.filename == caller), default=0)
    frames = frames[begin:]
    own = [frame for frame in frames if not frame.filename.startswith(INSTALLED)]
    # If the user code is an installed package, all frames look installed; then those of its first file count.
    return own or [frame for frame in frames if frame.filename == frames[0].filename]
