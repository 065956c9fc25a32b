"""What Ctrl-C and SIGTERM do, from a run's start to its end. The signals are real."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

import pytest

from roll.errors import WorkerFailed
from roll.pipeline.interrupt import SIGNALS, Interrupt
from tests import limits

Work = Callable[[Interrupt], Awaitable[None]]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A handler that is wrong here fails the test rather than ending pytest."""
    before = {number: signal.signal(number, lambda number, _: pytest.fail(f"signal {number} was not taken")) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def run(work: Work, ended: list[str], at_end: Callable[[], None] = lambda: None) -> None:
    """As a run does it: start, work, an end that takes its time, and the end of what the start made."""

    async def close() -> None:
        at_end()
        await asyncio.sleep(limits.LOOK)
        ended.append("role")

    async def experiment(interrupt: Interrupt) -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(close)
            with interrupt.working():
                await work(interrupt)

    with Interrupt() as interrupt:
        try:
            asyncio.run(experiment(interrupt))
        finally:
            at_end()
            ended.append("cluster")


async def step(interrupt: Interrupt) -> None:
    assert not interrupt.happened()
    await asyncio.sleep(0)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_ends_the_run_after_its_step(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    done, ended = [], []

    async def work(interrupt: Interrupt) -> None:
        await step(interrupt)
        asyncio.get_running_loop().call_soon(send, number)
        await limits.comes_true(interrupt.happened, "the signal has come")
        done.append("step")
        done.append("checkpoint")

    with pytest.raises(KeyboardInterrupt):
        run(work, ended)
    assert done == ["step", "checkpoint"] and ended == ["role", "cluster"]
    assert "the step is finished and saved first" in capsys.readouterr().err


@pytest.mark.parametrize("number", SIGNALS)
def test_the_second_ends_it_at_once(number: int) -> None:
    done, ended = [], []

    async def work(interrupt: Interrupt) -> None:
        asyncio.get_running_loop().call_soon(send, number)
        await limits.comes_true(interrupt.happened, "the first signal has come")
        asyncio.get_running_loop().call_soon(send, number)
        await asyncio.sleep(limits.CALL)
        done.append("step")

    with pytest.raises(KeyboardInterrupt):
        run(work, ended)
    assert not done and ended == ["role", "cluster"]


def test_one_is_enough_before_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[str] = []

    async def work(interrupt: Interrupt) -> None:
        asyncio.get_running_loop().call_soon(send, signal.SIGTERM)
        await asyncio.sleep(limits.CALL)  # the roles start

    with pytest.raises(KeyboardInterrupt):
        run(work, ended)
    assert ended == ["role", "cluster"] and "the step is finished" not in capsys.readouterr().err


@pytest.mark.parametrize("number", SIGNALS)
def test_the_end_is_not_cut_short(number: int) -> None:
    ended: list[str] = []

    async def work(interrupt: Interrupt) -> None:
        await step(interrupt)

    run(work, ended, at_end=lambda: send(number))
    assert ended == ["role", "cluster"]


def test_at_the_end_of_a_run_that_failed_a_signal_hides_no_cause() -> None:
    ended: list[str] = []

    async def work(interrupt: Interrupt) -> None:
        await step(interrupt)
        raise WorkerFailed("reference", 0, "the process died")

    with pytest.raises(WorkerFailed, match="reference rank 0: the process died"):
        run(work, ended, at_end=lambda: send(signal.SIGINT))
    assert ended == ["role", "cluster"]


def test_what_stands_before_the_work_ends_at_once_and_is_put_in_order() -> None:
    ended: list[str] = []
    with pytest.raises(KeyboardInterrupt), Interrupt():
        try:
            send(signal.SIGTERM)
            raise AssertionError("the run went on")
        finally:
            send(signal.SIGTERM)
            ended.append("folder")
    assert ended == ["folder"]


def test_a_handler_that_a_library_put_in_place_gives_way() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupt() as interrupt:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        interrupt.take()
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
