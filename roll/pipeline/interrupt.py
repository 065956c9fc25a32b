"""Ctrl-C and SIGTERM, from the start of a run to its end.

until the steps begin   the run ends at once: there is nothing to save
during the steps        the first ends the run after its step, with a checkpoint; the second ends it at once
at the end              processes are ended, folders removed, records closed: that has deadlines, and is not cut short
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Takes the signals while it is entered, in the main thread."""

    def __init__(self) -> None:
        self._happened = self._has_begun = self._is_ending = False
        self._work: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None

    def happened(self) -> bool:
        """Whether the run was asked to end. Asked before each step: from the first time on, a signal waits for the end of a step."""
        self._has_begun = True
        return self._happened

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take(self) -> None:
        """Take the signals; once more where a library, as Ray does, has put a handler of its own in place."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within, signals are for the running task. After it the run ends, and they have no effect.

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
        if self._work is not None:
            self._work[0].call_soon_threadsafe(self._tell)
        elif not self._is_ending:
            self._happened = self._is_ending = True
            raise KeyboardInterrupt

    def _tell(self) -> None:
        """In the event loop."""
        if self._work is None:
            return
        if self._happened or not self._has_begun:
            self._work[1].cancel()
        else:
            self._happened = True
            print("\ninterrupted: the step is finished and saved first; interrupt again to end at once", file=sys.stderr, flush=True)
