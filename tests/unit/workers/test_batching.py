"""Batched calls: each gets its own result, even if others fail. The remote process is simulated by a class in this
process.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from roll.errors import RollError
from roll.ray.batching import MOST_BYTES, Answers, BatchedCaller, BatchedServer, Failure, Stream, portable
from tests import limits


class Picky(Exception):
    """An exception that pickle cannot rebuild."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


class Strategy:
    """A strategy whose `wait` returns when its gate opens."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.gates: dict[int, asyncio.Event] = {}

    async def wait(self, number: int) -> int:
        self.begun.append(number)
        await self.gates.setdefault(number, asyncio.Event()).wait()
        return number

    def open(self, number: int) -> None:
        self.gates.setdefault(number, asyncio.Event()).set()

    async def double(self, number: int) -> int:
        return 2 * number

    async def large(self, size: int) -> bytes:
        return bytes(size)

    async def fail(self, error: Exception) -> None:
        raise error

    async def count(self, number: int) -> AsyncGenerator[int, None]:
        for item in range(number):
            await self.gates.setdefault(item, asyncio.Event()).wait()
            yield item

    async def count_and_fail(self, number: int) -> AsyncGenerator[int, None]:
        for item in range(number):
            yield item
        raise ValueError(f"more than {number}")

    async def say_what_cannot_travel(self) -> Any:
        return lambda: None


class Process:
    """An implementation of `Remote` in this process that counts calls and can die."""

    def __init__(self) -> None:
        self.strategy = Strategy()
        self.server = BatchedServer(lambda method: getattr(self.strategy, method))
        self.posts: list[int] = []
        self.collected: list[Answers] = []
        self.died = asyncio.Event()

    def post(self, calls: list[bytes]) -> None:
        self.posts.append(len(calls))
        if not self.died.is_set():
            self.server.post(calls)

    async def collect(self) -> Answers:
        answers, died = asyncio.ensure_future(self.server.collect()), asyncio.ensure_future(self.died.wait())
        await asyncio.wait((answers, died), return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if self.died.is_set():
            answers.cancel()
            raise ConnectionError("the process died")
        self.collected.append(answers.result())
        return answers.result()


def run(scenario: Callable[[Process, BatchedCaller], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        process = Process()
        async with asyncio.timeout(limits.CALL):
            await scenario(process, BatchedCaller(process))

    asyncio.run(bounded())


def test_calls_of_one_tick_are_batched() -> None:
    async def scenario(process: Process, caller: BatchedCaller) -> None:
        assert await asyncio.gather(*(caller.call("double", (number,)) for number in range(1000))) == list(
            range(0, 2000, 2)
        )
        assert process.posts == [1000]
        assert [len(answers) for answers in process.collected] == [1000]
        assert await caller.call("double", (4,)) == 8, "a later call works after all have finished"

    run(scenario)


def test_answer_does_not_wait_for_slow_call() -> None:
    async def scenario(process: Process, caller: BatchedCaller) -> None:
        slow, fast = caller.call("wait", (0,)), caller.call("wait", (1,))
        process.strategy.open(1)
        assert await fast == 1
        late = caller.call("wait", (2,))
        process.strategy.open(2)
        assert await late == 2 and not slow.done()
        process.strategy.open(0)
        assert await slow == 0
        assert process.strategy.begun == [0, 1, 2], "in the order of the calls"

    run(scenario)


def test_large_answers_travel_in_several_parts() -> None:
    async def scenario(process: Process, caller: BatchedCaller) -> None:
        size = MOST_BYTES // 3
        found = await asyncio.gather(*(caller.call("large", (size,)) for _ in range(10)))
        assert [len(one) for one in found] == [size] * 10
        assert [len(answers) for answers in process.collected] == [3, 3, 3, 1]

    run(scenario)


def test_what_one_call_raises_is_its_own() -> None:
    async def scenario(process: Process, caller: BatchedCaller) -> None:
        calls = [
            caller.call("double", (1,)),
            caller.call("fail", (ValueError("seven"),)),
            caller.call("fail_with_no_such_method", ()),
            caller.call("say_what_cannot_travel", ()),
            caller.call("double", (2,)),
        ]
        first, failed, missing, stuck, last = await asyncio.gather(*calls, return_exceptions=True)
        assert (first, last) == (2, 4)
        assert isinstance(failed, Failure) and isinstance(failed.cause, ValueError) and str(failed.cause) == "seven"
        assert "in fail\n" in str(failed), "the traceback is included"
        assert isinstance(missing, Failure) and isinstance(missing.cause, AttributeError)
        assert isinstance(stuck, Failure)

    run(scenario)


def test_unpicklable_error_arrives_as_text() -> None:
    async def scenario(process: Process, caller: BatchedCaller) -> None:
        async def picky() -> None:
            raise Picky("a cause", "its detail")

        process.strategy.double = picky  # type: ignore[method-assign, assignment]
        with pytest.raises(Failure) as raised:
            await caller.call("double", ())
        assert repr(raised.value.cause) == repr(RuntimeError("Picky: a cause and its detail"))

    run(scenario)


def test_unpicklable_argument_is_refused_to_its_caller() -> None:
    async def scenario(process: Process, caller: BatchedCaller) -> None:
        other = caller.call("double", (1,))
        with pytest.raises(Exception, match="lambda"):
            caller.call("double", (lambda: None,))
        assert await other == 2

    run(scenario)


def test_process_end_fails_waiting_and_later_calls() -> None:
    async def scenario(process: Process, caller: BatchedCaller) -> None:
        waiting = [caller.call("wait", (number,)) for number in range(3)]
        while not process.strategy.begun:
            await asyncio.sleep(0)
        process.died.set()
        for call in (*waiting, caller.call("double", (1,))):
            with pytest.raises(ConnectionError, match="died"):
                await call
        with pytest.raises(ConnectionError, match="died"):
            await caller.call("double", (1,))

    run(scenario)


def test_abandoned_call_delays_nothing() -> None:
    async def scenario(process: Process, caller: BatchedCaller) -> None:
        given_up = caller.call("wait", (0,))
        while not process.strategy.begun:
            await asyncio.sleep(0)
        given_up.cancel()
        assert await caller.call("double", (1,)) == 2
        process.strategy.open(0)
        assert await caller.call("double", (2,)) == 4, "the late result of the cancelled call is discarded"

    run(scenario)


async def following(stream: Stream) -> tuple[int] | None:
    await stream.wait()
    return stream.next()


async def items(stream: Stream) -> list[int]:
    """Return all remaining items of a stream."""
    found = []
    while (item := await following(stream)) is not None:
        found.append(item[0])
    return found


def test_stream_items_arrive_as_they_are_made() -> None:
    async def scenario(process: Process, caller: BatchedCaller) -> None:
        stream, other = caller.stream("count", (3,)), caller.stream("count", (2,))
        process.strategy.open(0)
        assert await following(stream) == (0,) and await following(other) == (0,)
        assert await caller.call("double", (1,)) == 2, "a call between items of streams"
        process.strategy.open(1)
        assert await items(other) == [1] and await following(stream) == (1,)
        process.strategy.open(2)
        assert await items(stream) == [2]
        assert not stream.has_come

    run(scenario)


def test_many_streams_travel_together() -> None:
    async def scenario(process: Process, caller: BatchedCaller) -> None:
        for number in range(4):
            process.strategy.open(number)
        streams = [caller.stream("count", (number % 5,)) for number in range(1000)]
        assert await asyncio.gather(*map(items, streams)) == [list(range(number % 5)) for number in range(1000)]
        assert process.posts == [1000] and len(process.collected) == 1

    run(scenario)


def test_what_a_stream_raises_comes_after_its_items() -> None:
    async def scenario(process: Process, caller: BatchedCaller) -> None:
        stream = caller.stream("count_and_fail", (2,))
        assert await following(stream) == (0,) and await following(stream) == (1,)
        with pytest.raises(Failure, match="more than 2"):
            await following(stream)

    run(scenario)


def test_the_end_of_the_process_fails_a_stream() -> None:
    async def scenario(process: Process, caller: BatchedCaller) -> None:
        process.strategy.open(0)
        stream = caller.stream("count", (2,))
        assert await following(stream) == (0,)
        process.died.set()
        with pytest.raises(ConnectionError, match="died"):
            await following(stream)

    run(scenario)


def test_a_stream_that_is_closed_holds_up_nothing() -> None:
    async def scenario(process: Process, caller: BatchedCaller) -> None:
        given_up = caller.stream("count", (2,))
        process.strategy.open(0)
        assert await following(given_up) == (0,)
        given_up.close()
        process.strategy.open(1)
        assert await caller.call("double", (1,)) == 2, "the late items of the closed stream are discarded"

    run(scenario)


@pytest.mark.parametrize(
    ("error", "travels"),
    [
        (ValueError("odd"), ValueError("odd")),
        (RollError("ours"), RollError("ours")),
        (np.linalg.LinAlgError("singular"), RuntimeError("LinAlgError: singular")),
    ],
)
def test_errors_do_not_make_callers_import_packages(error: Exception, travels: Exception) -> None:
    found = portable(error, pickle.dumps, pickle.loads)
    assert type(found) is type(travels) and str(found) == str(travels)
