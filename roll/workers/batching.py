"""Batches the calls of many tasks on one process into two calls of Ray.

    driver                                           process
      calls of one turn of the event loop ──post──▶  a task for each call
      ◀──────────────── collect ── what has come out since the last one

A call of Ray costs both processes about a millisecond of CPU time, more than all else that is done for a prompt. An answer waits for others
for `LINGER` at most, and not at all once nothing else is under way; so a process is asked at most 50 times a second, whatever it does.
A method that is an asynchronous generator answers with each item as it comes.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

from roll.workers.wire import decoded, encoded

LINGER = 0.02
"""Seconds for which the first answer waits for others."""
KNOWN = {"roll", "torch", "ray", *sys.stdlib_module_names}
"""Packages whose errors are sent as objects. Importing vLLM for one of its errors would block the driver for seconds."""
MOST_BYTES = 8 << 20
"""Largest size in bytes of answers that are sent together. The last answer may exceed it."""

Answers = list[tuple[int, bytes, bool]]
"""Encoded answers, each with the number of its call, and whether it is the last of it. An answer is a result, and None or a `Failure`;
the end of a stream has no bytes."""


class Failure(Exception):
    """An error of a call in the process, on the driver's side. `str()` is its traceback."""

    def __init__(self, cause: Exception, text: str) -> None:
        super().__init__(text)
        self.cause, self.text = cause, text

    def __reduce__(self) -> tuple[type[Failure], tuple[Exception, str]]:
        return type(self), (self.cause, self.text)


class Remote(Protocol):
    """The driver's interface to the process. Methods raise Ray's error if the process has died."""

    def post(self, calls: list[bytes]) -> object:
        """Begin calls."""
        ...

    async def collect(self) -> Answers:
        """Wait for at least one answer."""
        ...


class BatchedCaller:
    """The driver's side. For use in one event loop."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._number = 0
        self._outgoing: list[bytes] = []
        self._waiting: dict[int, asyncio.Future[Any] | Stream] = {}
        self._collecting: asyncio.Task[None] | None = None

    def call(self, method: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Return a call's result, or raise its `Failure`, or Ray's error if the process has died. A cancelled call is dropped."""
        number, future = self._send(method, arguments), asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        return future

    def stream(self, method: str, arguments: tuple[Any, ...]) -> Stream:
        """Yield the items of an asynchronous generator as they arrive. A closed stream is dropped."""
        number = self._send(method, arguments)
        stream = self._waiting[number] = Stream(lambda: self._waiting.pop(number, None))
        return stream

    def _send(self, method: str, arguments: tuple[Any, ...]) -> int:
        number = self._number
        call = encoded((number, method, arguments))
        self._number += 1
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._post)
        self._outgoing.append(call)
        return number

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
            while self._waiting:  # answered calls are removed, otherwise the process would be asked once too often
                for number, answer, last in await self._remote.collect():
                    waiting = self._waiting.pop(number, None) if last else self._waiting.get(number)
                    if isinstance(waiting, Stream):
                        waiting.put(answer)
                    elif waiting and not waiting.done():
                        _settle(waiting, answer)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        for waiting in list(self._waiting.values()):
            if isinstance(waiting, Stream):
                waiting.fail(error)
            elif not waiting.done():
                waiting.set_exception(error)


class Stream:
    """Items from the process, taken one by one. Raises as a call does."""

    def __init__(self, forget: Callable[[], object]) -> None:
        self._forget = forget
        self._come: deque[bytes | Exception] = deque()
        self._news = asyncio.Event()

    def put(self, answer: bytes) -> None:
        """Add an item. The last one has no bytes, or is a failure."""
        self._come.append(answer)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        self._come.append(error)
        self._news.set()

    @property
    def has_come(self) -> bool:
        """Whether `next` has an item or the end."""
        return bool(self._come)

    async def wait(self) -> None:
        """Wait for an item or the end."""
        await self._news.wait()

    def next(self) -> tuple[Any] | None:
        """Return the next item in a tuple, None at the end."""
        come = self._come.popleft()
        if not self._come:
            self._news.clear()
        if isinstance(come, Exception):
            raise come
        if not come:
            return None
        item, failure = _opened(come)
        if failure is not None:
            raise failure
        return (item,)

    def close(self) -> None:
        """Drop all later items."""
        self._forget()


def _opened(answer: bytes) -> tuple[Any, Exception | None]:
    """Return a result, or the error in its place."""
    try:
        return decoded(answer)
    except Exception as error:  # the driver cannot import the classes of the result
        return None, error


def _settle(future: asyncio.Future[Any], answer: bytes) -> None:
    result, failure = _opened(answer)
    if failure is None:
        future.set_result(result)
    else:
        future.set_exception(failure)


class BatchedServer:
    """The process's side. For use in one event loop."""

    def __init__(self, method: Callable[[str], Callable[..., Coroutine[Any, Any, Any] | AsyncGenerator[Any, None]]]) -> None:
        """`method` returns a method by its name."""
        self._method = method
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way = 0
        self._answers: deque[tuple[int, bytes, bool]] = deque()
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
            called = self._method(method)(*arguments)
            if isinstance(called, AsyncGenerator):
                async with aclosing(called):
                    async for item in called:
                        self._put(number, encoded((item, None)), last=False)
                answer = b""
            else:
                answer = encoded((await called, None))
        except Exception as error:
            answer = encoded((None, Failure(portable(error, encoded, decoded), traceback.format_exc())))
        self._under_way -= 1
        self._put(number, answer, last=True)

    def _put(self, number: int, answer: bytes, last: bool) -> None:
        self._answers.append((number, answer, last))
        self._size += len(answer)
        self._news.set()

    async def collect(self) -> Answers:
        """See `Remote`."""
        await self._news.wait()
        if self._under_way and self._size < MOST_BYTES:
            await asyncio.sleep(LINGER)
        answers: Answers = []
        left = self._size - MOST_BYTES
        while self._answers and (self._size > left or not self._answers[0][1]):
            answers.append(self._answers.popleft())
            self._size -= len(answers[-1][1])
        if not self._answers:
            self._news.clear()
        return answers


def portable(error: Exception, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> Exception:
    """Return the error, or only its text if it cannot be pickled or loading it would import an engine."""
    if type(error).__module__.partition(".")[0] not in KNOWN:
        return RuntimeError(f"{type(error).__name__}: {error}")
    try:
        decode(encode(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
