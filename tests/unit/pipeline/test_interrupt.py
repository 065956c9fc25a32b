"""The effect of signals from the start of a run to its end, tested with real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

import pytest

from roll.errors import WorkerFailed
from roll.runs.interrupt import SAME_SECONDS, Interrupt
from roll.system.command import SIGNALS
from tests import limits

Work = Callable[[Interrupt], Awaitable[None]]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Fail the test, instead of ending pytest, if `Interrupt` does not handle a signal."""
    before = {
        number: signal.signal(number, lambda number, _: pytest.fail(f"signal {number} was not handled"))
        for number in SIGNALS
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def run(
    work: Work, ended: list[str], at_end: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
) -> None:
    """Do the work like a real run: start, work, close the roles, which takes some time, and end the cluster."""

    async def close() -> None:
        at_end()
        await asyncio.sleep(limits.LOOK)
        ended.append("role")

    async def experiment(interrupt: Interrupt) -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(close)
            with interrupt.working():
                await work(interrupt)

    with Interrupt(clock) as interrupt:
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
        await limits.comes_true(interrupt.happened, "the signal has arrived")
        done.append("step")
        done.append("checkpoint")

    with pytest.raises(KeyboardInterrupt):
        run(work, ended)
    assert done == ["step", "checkpoint"] and ended == ["role", "cluster"]
    assert "Ctrl-C ends it at once" in capsys.readouterr().err


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize(("second", "steps"), [(signal.SIGINT, []), (signal.SIGTERM, ["step"])])
def test_only_a_person_ends_it_at_once(first: int, second: int, steps: list[str]) -> None:
    done, ended, taken = [], [], []

    async def work(interrupt: Interrupt) -> None:
        asyncio.get_running_loop().call_soon(send, first)
        await limits.comes_true(interrupt.happened, "the first signal has arrived")
        asyncio.get_running_loop().call_soon(send, second)
        await limits.comes_true(lambda: len(taken) == 2, "the second signal has arrived")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        done.append("step")

    def clock() -> float:
        taken.append("signal")
        return SAME_SECONDS * len(taken)

    with pytest.raises(KeyboardInterrupt):
        run(work, ended, clock=clock)
    assert done == steps and ended == ["role", "cluster"]


def test_signals_within_a_second_are_one() -> None:
    """A run may get one interrupt several times: from the terminal or the batch system, and from the launcher, which
    forwards it.
    """
    done, ended, taken = [], [], []

    async def work(interrupt: Interrupt) -> None:
        asyncio.get_running_loop().call_soon(send, signal.SIGINT)
        await limits.comes_true(interrupt.happened, "the first signal has arrived")
        send(signal.SIGTERM)
        send(signal.SIGINT)
        await limits.comes_true(lambda: len(taken) == 3, "the other signals have arrived")
        await asyncio.sleep(0)
        done.append("step")

    def clock() -> float:
        taken.append("signal")
        return 0.3 * SAME_SECONDS * len(taken)

    with pytest.raises(KeyboardInterrupt):
        run(work, ended, clock=clock)
    assert done == ["step"] and ended == ["role", "cluster"]


def test_a_run_goes_on_without_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, handler := lambda number, _: pytest.fail("SIGHUP was handled"))
    done, ended = [], []

    async def work(interrupt: Interrupt) -> None:
        send(signal.SIGHUP)
        await step(interrupt)
        send(signal.SIGHUP)
        await step(interrupt)
        done.append("step")

    try:
        run(work, ended, at_end=lambda: send(signal.SIGHUP))
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done == ["step"] and ended == ["role", "cluster"]


def test_one_is_enough_before_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[str] = []

    async def work(interrupt: Interrupt) -> None:
        asyncio.get_running_loop().call_soon(send, signal.SIGTERM)
        await asyncio.sleep(limits.CALL)  # the roles are starting

    with pytest.raises(KeyboardInterrupt):
        run(work, ended)
    assert ended == ["role", "cluster"] and "Ctrl-C" not in capsys.readouterr().err


@pytest.mark.parametrize("number", SIGNALS)
def test_the_end_is_not_cut_short(number: int) -> None:
    ended: list[str] = []

    async def work(interrupt: Interrupt) -> None:
        await step(interrupt)

    run(work, ended, at_end=lambda: send(number))
    assert ended == ["role", "cluster"]


def test_signal_after_failure_hides_no_cause() -> None:
    ended: list[str] = []
    failure = WorkerFailed("reference", 0, "the process died")

    async def work(interrupt: Interrupt) -> None:
        await step(interrupt)
        raise failure

    with pytest.raises(WorkerFailed) as raised:
        run(work, ended, at_end=lambda: send(signal.SIGINT))
    assert raised.value is failure and ended == ["role", "cluster"]


def test_signal_before_the_work_interrupts_in_order() -> None:
    ended: list[str] = []
    with pytest.raises(KeyboardInterrupt), Interrupt():
        try:
            send(signal.SIGTERM)
            raise AssertionError("the run continued after the signal")
        finally:
            send(signal.SIGTERM)
            ended.append("folder")
    assert ended == ["folder"]


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_during_upload_ends_the_run(number: int) -> None:
    ended: list[str] = []
    with Interrupt() as interrupt:

        async def work() -> None:
            with interrupt.working():
                pass

        asyncio.run(work())
        with pytest.raises(KeyboardInterrupt), interrupt.interruptible():
            send(number)
            time.sleep(limits.LOOK)
            ended.append("upload")
        send(number)
        time.sleep(limits.LOOK)
        ended.append("cluster")
    assert ended == ["cluster"], "a signal after it does not disturb the end"
