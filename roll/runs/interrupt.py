"""Handles signals from the start of a run to its end: Ctrl-C (SIGINT) and SIGTERM end it, SIGHUP does not.

before the first step   a signal ends the run at once, because there is nothing to save
during the steps        the first signal ends the run after the current step, with a checkpoint; after it, Ctrl-C ends
                        the run at once, but SIGTERM, which launchers and batch systems may repeat, does not
during the shutdown     signals are ignored: ending processes, removing folders and closing records have deadlines of
                        their own
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from roll.system.command import SIGNALS

LOG = logging.getLogger(__name__)
SAME_SECONDS = 1.0
"""Seconds in which several signals count as one: a terminal, a launcher and a batch system may send each."""


class Interrupt:
    """A context in which the signals are handled in the main thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock, self._first = clock, 0.0
        self._happened = self._has_begun = self._is_ending = False
        self._work: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None

    def happened(self) -> bool:
        """Return whether the run should end. Call before each step: from then on, signals wait for a step's end."""
        self._has_begun = True
        return self._happened

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGHUP)}
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in SIGNALS:
            signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def working(self) -> Iterator[None]:
        """A context in which signals act on the task; after it, they do not. Raises KeyboardInterrupt for one."""
        task = asyncio.current_task()
        assert task is not None
        self._work = (asyncio.get_running_loop(), task)
        try:
            yield
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            self._work, self._is_ending = None, True
        if self._happened:
            raise KeyboardInterrupt

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A context after the work in which a signal raises KeyboardInterrupt at once, as before the work."""
        self._is_ending = False
        try:
            yield
        finally:
            self._is_ending = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._work is not None:
            self._work[0].call_soon_threadsafe(self._report, signal.Signals(number), self._clock())
        elif not self._is_ending:
            self._happened = self._is_ending = True
            raise KeyboardInterrupt

    def _report(self, number: signal.Signals, now: float) -> None:
        """Handle a signal that arrived at the time `now`. Runs in the event loop."""
        is_repeated = number is not signal.SIGINT or now - self._first < SAME_SECONDS
        if self._work is None or self._happened and is_repeated:
            return
        if self._happened or not self._has_begun:
            LOG.info("%s: the run ends at once", number.name)
            self._work[1].cancel()
        else:
            self._happened, self._first = True, now
            LOG.info("%s: the run ends after the current step", number.name)
            print(
                "\ninterrupted: the run ends after the current step; Ctrl-C ends it at once",
                file=sys.stderr,
                flush=True,
            )
