"""Batched calls: each gets its own result, even if others fail. The remote process is simulated by a class in this
process.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll.errors import RollError
from roll.ray.batching import MOST_BYTES, Answers, BatchedCaller, BatchedServer, Failure, portable
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
    """A process that counts calls and can die, and Ray's handle of it."""

    def __init__(self) -> None:
        self.strategy = Strategy()
        self.server = BatchedServer()
        self.server.strategy = self.strategy
        self.posts: list[int] = []
        self.collected: list[Answers] = []
        self.died = asyncio.Event()
        self.post, self.collect = SimpleNamespace(remote=self._post), SimpleNamespace(remote=self._collect)

    def _post(self, calls: list[bytes]) -> object:
        self.posts.append(len(calls))
        return None if self.died.is_set() else asyncio.ensure_future(self.server.post(calls))

    async def _collect(self) -> Answers:
        answers, died = asyncio.ensure_future(self.server.collect()), asyncio.ensure_future(self.died.wait())
        await asyncio.wait((answers, died), return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if self.died.is_set():
            answers.cancel()
            raise ConnectionError("the process died")
        self.collected.append(answers.result())
        return answers.result()


class Caller(BatchedCaller):
    """A caller whose calls begin at once."""

    def ask(self, method: str, *arguments: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self.call(method, arguments, limits.CALL))

    def items(self, method: str, number: int) -> AsyncGenerator[int, None]:
        return self.stream(method, number, seconds=limits.CALL)


def run(scenario: Callable[[Process, Caller], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        process = Process()
        async with asyncio.timeout(limits.CALL):
            await scenario(process, Caller(process, lambda method, seconds: nullcontext()))

    asyncio.run(bounded())


def test_calls_of_one_tick_are_batched() -> None:
    async def scenario(process: Process, caller: Caller) -> None:
        assert await asyncio.gather(*(caller.ask("double", number) for number in range(1000))) == list(
            range(0, 2000, 2)
        )
        assert process.posts == [1000]
        assert [len(answers) for answers in process.collected] == [1000]
        assert await caller.ask("double", 4) == 8, "a later call works after all have finished"

    run(scenario)


def test_answer_does_not_wait_for_slow_call() -> None:
    async def scenario(process: Process, caller: Caller) -> None:
        slow, fast = caller.ask("wait", 0), caller.ask("wait", 1)
        process.strategy.open(1)
        assert await fast == 1
        late = caller.ask("wait", 2)
        process.strategy.open(2)
        assert await late == 2 and not slow.done()
        process.strategy.open(0)
        assert await slow == 0
        assert process.strategy.begun == [0, 1, 2], "in the order of the calls"

    run(scenario)


def test_large_answers_travel_in_several_parts() -> None:
    async def scenario(process: Process, caller: Caller) -> None:
        size = MOST_BYTES // 3
        found = await asyncio.gather(*(caller.ask("large", size) for _ in range(10)))
        assert [len(one) for one in found] == [size] * 10
        assert [len(answers) for answers in process.collected] == [3, 3, 3, 1]

    run(scenario)


def test_what_one_call_raises_is_its_own() -> None:
    async def scenario(process: Process, caller: Caller) -> None:
        calls = [
            caller.ask("double", 1),
            caller.ask("fail", ValueError("seven")),
            caller.ask("fail_with_no_such_method"),
            caller.ask("say_what_cannot_travel"),
            caller.ask("double", 2),
        ]
        first, failed, missing, stuck, last = await asyncio.gather(*calls, return_exceptions=True)
        assert (first, last) == (2, 4)
        assert isinstance(failed, Failure) and isinstance(failed.cause, ValueError) and str(failed.cause) == "seven"
        assert "in fail\n" in str(failed), "the traceback is included"
        assert isinstance(missing, Failure) and isinstance(missing.cause, AttributeError)
        assert isinstance(stuck, Failure)

    run(scenario)


def test_unpicklable_error_arrives_as_text() -> None:
    async def scenario(process: Process, caller: Caller) -> None:
        async def picky() -> None:
            raise Picky("a cause", "its detail")

        process.strategy.double = picky  # type: ignore[method-assign, assignment]
        with pytest.raises(Failure) as raised:
            await caller.ask("double")
        assert repr(raised.value.cause) == repr(RuntimeError("Picky: a cause and its detail"))

    run(scenario)


def test_unpicklable_argument_is_refused_to_its_caller() -> None:
    async def scenario(process: Process, caller: Caller) -> None:
        other = caller.ask("double", 1)
        with pytest.raises(Exception, match="lambda"):
            await caller.ask("double", lambda: None)
        assert await other == 2

    run(scenario)


def test_process_end_fails_waiting_and_later_calls() -> None:
    async def scenario(process: Process, caller: Caller) -> None:
        waiting = [caller.ask("wait", number) for number in range(3)]
        while not process.strategy.begun:
            await asyncio.sleep(0)
        process.died.set()
        for call in (*waiting, caller.ask("double", 1)):
            with pytest.raises(ConnectionError, match="died"):
                await call
        with pytest.raises(ConnectionError, match="died"):
            await caller.ask("double", 1)

    run(scenario)


def test_abandoned_call_delays_nothing() -> None:
    async def scenario(process: Process, caller: Caller) -> None:
        given_up = caller.ask("wait", 0)
        while not process.strategy.begun:
            await asyncio.sleep(0)
        given_up.cancel()
        assert await caller.ask("double", 1) == 2
        process.strategy.open(0)
        assert await caller.ask("double", 2) == 4, "the late result of the cancelled call is discarded"

    run(scenario)


async def rest(stream: AsyncGenerator[int, None]) -> list[int]:
    """Return all remaining items of a stream."""
    return [item async for item in stream]


def test_stream_items_arrive_as_they_are_made() -> None:
    async def scenario(process: Process, caller: Caller) -> None:
        stream, other = caller.items("count", 3), caller.items("count", 2)
        process.strategy.open(0)
        assert await anext(stream) == 0 and await anext(other) == 0
        assert await caller.ask("double", 1) == 2, "a call between items of streams"
        process.strategy.open(1)
        assert await rest(other) == [1] and await anext(stream) == 1
        process.strategy.open(2)
        assert await rest(stream) == [2]

    run(scenario)


def test_many_streams_travel_together() -> None:
    async def scenario(process: Process, caller: Caller) -> None:
        for number in range(4):
            process.strategy.open(number)
        streams = [caller.items("count", number % 5) for number in range(1000)]
        assert await asyncio.gather(*map(rest, streams)) == [list(range(number % 5)) for number in range(1000)]
        assert process.posts == [1000] and len(process.collected) == 1

    run(scenario)


def test_what_a_stream_raises_comes_after_its_items() -> None:
    async def scenario(process: Process, caller: Caller) -> None:
        stream = caller.items("count_and_fail", 2)
        assert await anext(stream) == 0 and await anext(stream) == 1
        with pytest.raises(Failure, match="more than 2"):
            await anext(stream)

    run(scenario)


def test_the_end_of_the_process_fails_a_stream() -> None:
    async def scenario(process: Process, caller: Caller) -> None:
        process.strategy.open(0)
        stream = caller.items("count", 2)
        assert await anext(stream) == 0
        process.died.set()
        with pytest.raises(ConnectionError, match="died"):
            await anext(stream)

    run(scenario)


def test_a_stream_that_is_closed_holds_up_nothing() -> None:
    async def scenario(process: Process, caller: Caller) -> None:
        given_up = caller.items("count", 2)
        process.strategy.open(0)
        assert await anext(given_up) == 0
        await given_up.aclose()
        process.strategy.open(1)
        assert await caller.ask("double", 1) == 2, "the late items of the closed stream are discarded"

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
