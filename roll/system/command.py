"""Runs a command: turns its errors and signals into its exit status, and keeps its output from failing."""

from __future__ import annotations

import atexit
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from roll.errors import INTERRUPTED, PART_FAILED, RollError
from roll.system.terminal import guarded_terminal

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a command. SIGHUP does not: a command goes on without its terminal, as under `nohup`."""


def run_command(work: Callable[[], object]) -> int:
    """Run a command and return its exit status. Print errors to stderr, unexpected ones with a traceback.

    Call from the main thread. A signal raises KeyboardInterrupt in `work`, unless it installs its own handlers.
    """
    with guarded_terminal(), _interruptible() as settle:
        try:
            try:
                work()
            finally:
                settle()
        except RollError as error:
            print(error, file=sys.stderr)
            return error.exit_status
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
        except Exception:
            traceback.print_exc()
            return PART_FAILED
        return 0


@contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """A context in which a signal raises KeyboardInterrupt, until the yielded function is called. Then signals are
    ignored, also while the interpreter exits, since libraries take a while to end. SIGHUP is always ignored.
    """

    def interrupted(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def settle() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in SIGNALS:
        if before[number] is not signal.SIG_IGN:  # as in a shell's background job
            signal.signal(number, interrupted)
    try:
        yield settle
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        atexit.register(settle)
