"""Failures of tools: which calls failed by the fault of the tool, not of the policy, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from roll.hosted.raised import NOTE_CHARACTERS, raised_where, trace_of

MOST_TOLD = 8
"""Largest number of kinds of failures of one tool that are reported."""
MOST_KIND = 200
"""Largest number of characters of a kind."""
_PLACE = re.compile(r"([\w.]+)(?::.*)? \((.+), line (\d+)\)(?:; .*)?", re.DOTALL)


class ToolFailure(NamedTuple):
    """The first failure of its kind of a tool."""

    tool: str
    kind: str
    """Equal for failures with the same cause: an exception and its line, or what happened, without numbers."""
    note: str
    """What happened."""
    trace: str
    """The last frames of the tool's code; empty if it raised nothing."""


_noted: ContextVar[list[ToolFailure] | None] = ContextVar("tool_failures", default=None)


@contextmanager
def noting() -> Iterator[list[ToolFailure]]:
    """A context whose failures of tools, also those of tasks that begin in it, are put into the returned list."""
    found: list[ToolFailure] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def note_raised(tool: str, error: BaseException, caller: str) -> None:
    """Note the exception of a tool, which the file `caller` called."""
    note = raised_where(error, caller)
    place = _PLACE.fullmatch(note)
    kind = "{} at {}, line {}".format(*place.groups()) if place else type(error).__name__
    _note(ToolFailure(tool, kind[:MOST_KIND], note, trace_of(error, caller)))


def note_failed(tool: str, kind: str, note: str) -> None:
    """Note a call that failed without an exception of the tool's code."""
    _note(ToolFailure(tool, kind[:MOST_KIND], note[:NOTE_CHARACTERS], ""))


def _note(failure: ToolFailure) -> None:
    if (found := _noted.get()) is not None:
        found.append(failure)


class FirstOfKind:
    """Lets the first failure of each kind of each tool pass, at most MOST_TOLD of a tool."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], set[str]] = {}

    def is_new(self, failure: ToolFailure, domain: str = "") -> bool:
        """Whether a failure is the first of its kind, and fewer than MOST_TOLD of its tool were reported."""
        kinds = self._kinds.setdefault((domain, failure.tool), set())
        if failure.kind in kinds or len(kinds) >= MOST_TOLD:
            return False
        kinds.add(failure.kind)
        return True
