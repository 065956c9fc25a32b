"""A signal that does not end the wait of the thread that takes it."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from roll.system.event_loop import run_in_loop
from tests import limits


def test_a_signal_that_does_not_end_the_wait_is_taken_all_the_same() -> None:
    """As where it comes just before the wait begins. Here another thread gets it; its handler runs in the main one."""
    course: list[str] = []

    async def work() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        try:
            await asyncio.sleep(limits.CALL)
            course.append("it was not taken")
        finally:
            course.append("closed")

    async def cell() -> None:
        run_in_loop(work)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(cell())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert course == ["closed"]
