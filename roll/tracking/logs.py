"""The driver's log file. The terminal shows only its warnings and errors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO


class RunLog:
    """Sends Python's logging to `<run>/logs/driver.log`, and warnings to stderr too, from `__init__` to `close`."""

    def __init__(self, run_dir: Path, hide: Callable[[str], str] = str, level: int = logging.INFO) -> None:
        """`hide` removes secrets from a text."""
        self.path = run_dir / "logs" / "driver.log"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        root = logging.getLogger()
        self._before = (root.level, root.handlers[:])
        to_file = _LogFile(self.path, encoding="utf-8")
        to_file.setFormatter(_Hiding("%(asctime)s %(levelname)s %(name)s: %(message)s", hide))
        to_terminal = _CurrentStderr(logging.WARNING)
        to_terminal.setFormatter(_Hiding("%(levelname)s: %(message)s", hide))
        self._handlers = [to_file, to_terminal]
        root.handlers[:] = self._handlers
        root.setLevel(level)
        logging.captureWarnings(True)

    def close(self) -> None:
        """Close the file and restore the previous logging."""
        logging.captureWarnings(False)
        root = logging.getLogger()
        level, root.handlers[:] = self._before
        root.setLevel(level)
        for handler in self._handlers:
            handler.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Hiding(logging.Formatter):
    """Removes secrets from log messages, including those of libraries and tracebacks."""

    def __init__(self, form: str, hide: Callable[[str], str]) -> None:
        super().__init__(form)
        self._hide = hide

    def format(self, record: logging.LogRecord) -> str:
        return self._hide(super().format(record))


class _LogFile(logging.FileHandler):
    """A log file that reports only once that it cannot be written, as on a full disk. The run continues."""

    _is_told = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._is_told:
            self._is_told = True
            print(f"WARNING: {self.baseFilename} cannot be written: {sys.exception()}", file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which the live view replaces to show messages above its lines."""

    def __init__(self, level: int) -> None:
        logging.Handler.__init__(self, level)

    @property
    def stream(self) -> TextIO:
        return sys.stderr
