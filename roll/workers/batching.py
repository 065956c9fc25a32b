"""Calls on one process that many tasks make at once: two calls of Ray, however many they are.

    driver                                           process
      calls of one turn of the event loop ──post──▶  a task for each call
      ◀─────────────────── collect ── what has ended since the last one

A call of Ray costs both processes about a millisecond of CPU time, more than all else that is done for a prompt. An answer waits for others
for `LINGER` at most, and not at all once nothing else is under way; so a process is asked at most 50 times a second, whatever it does.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from roll.workers.wire import decoded, encoded

LINGER = 0.02
"""Seconds that the first answer waits for others."""
MOST_BYTES = 8 << 20
"""Of answers that travel together; the last of them may go beyond."""

Answers = list[tuple[int, bytes]]
"""Encoded answers, each with the number of its call. An answer is its result, and None or a `Failure`."""


class Failure(Exception):
    """What a call raised in the process, as the driver's side of it sees it; `str()` is its traceback."""

    def __init__(self, cause: Exception, text: str) -> None:
        super().__init__(text)
        self.cause, self.text = cause, text

    def __reduce__(self) -> tuple[type[Failure], tuple[Exception, str]]:
        return type(self), (self.cause, self.text)


class Remote(Protocol):
    """The process, as the driver reaches it. Each raises what Ray raises where the process has died."""

    def post(self, calls: list[bytes]) -> object:
        """Begin calls."""
        ...

    async def collect(self) -> Answers:
        """Wait for answers, one at least."""
        ...


class BatchedCaller:
    """The driver's side, in one event loop."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._number = 0
        self._outgoing: list[bytes] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._collecting: asyncio.Task[None] | None = None

    def call(self, method: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Its result, or what it raised: a `Failure` in the process, or what Ray raises where that has died. Cancelled, it is forgotten."""
        loop, number = asyncio.get_running_loop(), self._number
        call = encoded((number, method, arguments))
        self._number += 1
        if not self._outgoing:
            loop.call_soon(self._post)
        self._outgoing.append(call)
        future = self._waiting[number] = loop.create_future()
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        return future

    def _post(self) -> None:
        calls, self._outgoing = self._outgoing, []
        try:
            self._remote.post(calls)
        except Exception as error:
            self._fail(error)
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        try:
            while self._waiting:
                for number, answer in await self._remote.collect():
                    if (future := self._waiting.get(number)) and not future.done():
                        _settle(future, answer)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


def _settle(future: asyncio.Future[Any], answer: bytes) -> None:
    try:
        result, failure = decoded(answer)
    except Exception as error:  # the driver lacks what it is made of
        failure, result = error, None
    if failure is None:
        future.set_result(result)
    else:
        future.set_exception(failure)


class BatchedServer:
    """The process's side, in one event loop."""

    def __init__(self, method: Callable[[str], Callable[..., Coroutine[Any, Any, Any]]]) -> None:
        """`method` finds one by its name."""
        self._method = method
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way = 0
        self._answers: deque[tuple[int, bytes]] = deque()
        self._size = 0
        self._news = asyncio.Event()

    def post(self, calls: list[bytes]) -> None:
        """See `Remote`."""
        self._under_way += len(calls)
        for call in calls:
            task = asyncio.create_task(self._answer(*decoded(call)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer = encoded((await self._method(method)(*arguments), None))
        except Exception as error:
            answer = encoded((None, Failure(portable(error, encoded, decoded), traceback.format_exc())))
        self._under_way -= 1
        self._answers.append((number, answer))
        self._size += len(answer)
        self._news.set()

    async def collect(self) -> Answers:
        """See `Remote`."""
        await self._news.wait()
        if self._under_way and self._size < MOST_BYTES:
            await asyncio.sleep(LINGER)
        answers: Answers = []
        left = self._size - MOST_BYTES
        while self._answers and self._size > left:
            answers.append(self._answers.popleft())
            self._size -= len(answers[-1][1])
        if not self._answers:
            self._news.clear()
        return answers


def portable(error: Exception, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> Exception:
    """The error, or its text alone where it cannot travel."""
    try:
        decode(encode(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
