"""Ctrl-C and SIGTERM: the first ends the run after its step, with a checkpoint; the second ends it at once."""

from __future__ import annotations

import asyncio
import signal
import sys
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def terminate(number: int, frame: FrameType | None) -> None:
    """Handler of SIGTERM outside the loop: as Ctrl-C, so that everything on the way is put in order."""
    raise KeyboardInterrupt


class Interrupt:
    """Takes the signals while it is entered, inside a running event loop."""

    def __init__(self) -> None:
        self._happened = False

    def happened(self) -> bool:
        """Whether the run was asked to end."""
        return self._happened

    def __enter__(self) -> Interrupt:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)
            signal.signal(number, self._before[number])

    def _handle(self) -> None:
        if self._happened and self._task is not None:
            self._task.cancel()
            return
        self._happened = True
        print("\ninterrupted: the step is finished and saved first; interrupt again to end at once", file=sys.stderr, flush=True)
