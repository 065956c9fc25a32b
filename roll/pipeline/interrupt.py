"""Handles Ctrl-C, SIGTERM and SIGHUP from the start of a run to its end.

until the steps begin   the run ends at once: there is nothing to save
during the steps        the first ends the run after its step, with a checkpoint; the second ends it at once
at the end              processes are ended, folders removed, records closed: that has deadlines, and is not cut short
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

LOG = logging.getLogger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SECONDS = 1.0
"""Seconds within which signals count as one, because a terminal, a launcher and a queue may each send it."""


class Interrupt:
    """Handles the signals in the main thread while entered."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is in seconds."""
        self._clock, self._first = clock, 0.0
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        self._happened = self._has_begun = self._is_ending = False
        self._work: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None

    def happened(self) -> bool:
        """Whether the run should end. Called before each step. After the first call, signals wait for the end of a step."""
        self._has_begun = True
        return self._happened

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        if self._before[signal.SIGHUP] is signal.SIG_IGN:  # ignored, as nohup wants it
            del self._before[signal.SIGHUP]
        self.take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take(self) -> None:
        """Install the handlers. Call again after a library, such as Ray, has installed its own."""
        for number in self._before:
            signal.signal(number, self._handle)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let signals act on the running task while the block lasts. Afterwards, at the run's end, they have no effect.

        Raises:
            KeyboardInterrupt: the run was asked to end.
        """
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

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._leave_terminals()
        if self._work is not None:
            self._work[0].call_soon_threadsafe(self._tell, signal.Signals(number).name, self._clock())
        elif not self._is_ending:
            self._happened = self._is_ending = True
            raise KeyboardInterrupt

    def _tell(self, name: str, now: float) -> None:
        """Handle a signal, with its time, in the event loop."""
        if self._work is None or self._happened and now - self._first < SAME_SECONDS:
            return
        if self._happened or not self._has_begun:
            LOG.info("%s: the run ends at once", name)
            self._work[1].cancel()
        else:
            self._happened, self._first = True, now
            LOG.info("%s: the run ends after the current step", name)
            print("\ninterrupted: the step is finished and saved first; interrupt again to end at once", file=sys.stderr, flush=True)

    def _leave_terminals(self) -> None:
        """Drop output to a terminal that is gone, because a write error would hide how the run ends."""
        with open(os.devnull, "w") as nowhere:
            for number in self._terminals:
                if not os.isatty(number):
                    os.dup2(nowhere.fileno(), number)
