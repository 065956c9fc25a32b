"""`run_in_loop` runs a coroutine to its end with or without a running event loop. A signal handler that raises cancels
it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable

import pytest

from roll.system.event_loop import in_own_thread, run_in_loop, uninterrupted
from tests import limits


async def where() -> int:
    await asyncio.sleep(0)
    return threading.get_ident()


def test_without_loop_work_runs_in_calling_thread() -> None:
    assert run_in_loop(where) == threading.get_ident()


def test_inside_loop_work_runs_in_another_loop() -> None:
    async def cell() -> tuple[int, int]:
        return run_in_loop(where), run_in_loop(where)

    first, second = asyncio.run(cell())
    assert threading.get_ident() not in (first, second)


def test_what_it_raises_reaches_the_caller() -> None:
    async def fail() -> None:
        raise ValueError("the cause")

    async def cell() -> None:
        run_in_loop(fail)

    with pytest.raises(ValueError, match="the cause"):
        asyncio.run(cell())


def to_the_process() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def to_another_thread() -> None:
    """Send a signal to the calling thread. It does not interrupt the main thread's wait, but its handler still runs in
    the main thread.

    A signal to the process that arrives just before the wait begins has the same effect.
    """
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)


@pytest.mark.parametrize("send", [to_the_process, to_another_thread])
def test_raising_signal_handler_cancels_work_and_waits(send: Callable[[], None]) -> None:
    course: list[str] = []

    async def work() -> None:
        send()
        try:
            await asyncio.sleep(limits.CALL)
            course.append("it was not cancelled")
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


def test_signal_during_thread_start_prevents_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`Thread.start` waits for the new thread, so a signal handler may raise inside it although the thread already
    runs.
    """
    course: list[str] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        threads.append(thread)
        raise KeyboardInterrupt

    async def work() -> None:
        course.append("begun")

    async def cell() -> None:
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        run_in_loop(work)

    threads: list[threading.Thread] = []
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    for thread in threads:
        thread.join(limits.CALL)
    assert [thread.is_alive() for thread in threads] == [False]
    assert course == []


def test_own_thread_returns_and_raises() -> None:
    assert asyncio.run(in_own_thread(lambda: 3)) == 3
    with pytest.raises(ValueError, match="the cause"):
        asyncio.run(in_own_thread(lambda: int("the cause")))


def test_blocked_own_thread_does_not_delay_the_end() -> None:
    free = threading.Event()

    async def given_up() -> None:
        async with asyncio.timeout(limits.NONE):
            await in_own_thread(lambda: free.wait(limits.CALL))

    try:
        with pytest.raises(TimeoutError):
            asyncio.run(given_up())
        assert any(thread.daemon for thread in threading.enumerate()), "it is still blocked"
    finally:
        free.set()


@pytest.mark.parametrize("cancellations", [0, 1, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_uninterrupted_work_ends_before_its_caller(cancellations: int, fails: bool) -> None:
    course = list[str]()

    async def work() -> str:
        for _ in range(5):
            await asyncio.sleep(0)
        course.append("worked")
        if fails:
            raise OSError("the cause")
        return "result"

    async def calls() -> None:
        try:
            course.append(await uninterrupted(work()))
        except OSError as error:
            course.append(str(error))
        await asyncio.sleep(0)
        course.append("not cancelled")

    async def cancels() -> None:
        calling = asyncio.create_task(calls())
        for _ in range(cancellations):
            await asyncio.sleep(0)
            calling.cancel()
        await asyncio.wait({calling}, timeout=limits.CALL)
        assert calling.cancelled() == (cancellations > 0)

    asyncio.run(cancels())
    assert course == ["worked", "the cause" if fails else "result", *["not cancelled"] * (cancellations == 0)]


def test_a_timeout_of_uninterrupted_work_is_a_timeout() -> None:
    course = list[str]()

    async def work() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        course.append("worked")

    async def late() -> None:
        async with asyncio.timeout(limits.NONE):
            await uninterrupted(work())
            course.append("went on")
            await asyncio.sleep(limits.CALL)

    with pytest.raises(TimeoutError):
        asyncio.run(late())
    assert course == ["worked", "went on"]
