"""Keeps a command alive whose terminal is closed, or whose output nobody reads any more."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

LOG = logging.getLogger(__name__)


@contextmanager
def guarded_terminal() -> Iterator[None]:
    """A context in which writing to stdout and stderr does not fail. What cannot be written there goes to the log."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast("TextIO", _Guarded(sys.stdout)), cast("TextIO", _Guarded(sys.stderr))
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


class _Guarded:
    """A text stream that turns to the log at the first error. Its other attributes are those of the stream."""

    def __init__(self, stream: TextIO | None) -> None:
        """`stream` is None if the process was started without it."""
        self._is_open = stream is not None
        self._pending = ""  # text that is perhaps not written yet
        self._stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def write(self, text: str) -> int:
        """Write the text and flush whole lines, so that an error belongs to them."""
        self._pending += text
        if self._is_open:
            try:
                self._stream.write(text)
            except (OSError, ValueError) as error:  # ValueError: the stream was closed
                self._leave(error)
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        if self._is_open:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._leave(error)
        if not self._is_open and self._pending.strip():
            LOG.info("%s", self._pending.rstrip("\n"))
        self._pending = ""

    def _leave(self, error: Exception) -> None:
        """Give the stream's descriptor another file, because the interpreter flushes it once more at its end."""
        self._is_open = False
        name = getattr(self._stream, "name", "the output")  # a stream in memory has none
        LOG.info("%s cannot be written any more, and its text goes here: %s", name, error)
        with suppress(OSError, ValueError), open(os.devnull, "w", encoding="utf-8") as nowhere:  # without a descriptor
            os.dup2(nowhere.fileno(), self._stream.fileno())

    def isatty(self) -> bool:
        """Return whether the text is shown at once to a person."""
        return self._is_open and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
