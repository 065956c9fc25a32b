"""Signals to a command whose modules are still being imported. `run_command` replaces these handlers."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType

STATUS = 130
"""`roll.errors.INTERRUPTED`, which is imported later."""


def end_at_signals() -> None:
    """Let a signal end the command with its status, and ignore the end of its terminal. Nothing has to be cleaned up
    yet. Ignored signals stay ignored.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):  # nobody reads it
        os.write(2, b"interrupted\n")
    os._exit(STATUS)
