"""Batches the calls of many tasks on one process into two Ray calls.

    driver                                           process
      calls of one event-loop iteration ───post───▶  a task for each call
      ◀──────────────── collect ── answers since the last collect

A Ray call costs both processes about a millisecond of CPU time, more than all other work for a prompt. An answer
therefore waits `LINGER` seconds for further answers, unless no other call is in flight or `MOST_BYTES` bytes of answers
wait already. This limits a process to about 50 `collect` calls per second. A method that is an asynchronous generator
answers with each item as it arrives.

Encodes the values of batched calls with pickle, and completions in a more compact form, because there are many of them.

Token ids and log-probs of a completion are sent as bytes, and its versions as one number if all tokens have the same
version. Decoded arrays are read-only, like arrays that Ray returns.

Typed calls on the ranks of a group. Methods are passed as attributes of their protocol, so that arguments and
results are type-checked.

    await group.within(seconds).all(GenerateStrategy.load_bucket, bucket)

Only the method's name and its arguments are sent to a rank. Plain methods and coroutines are called in the same way.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from io import BytesIO
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, TypeVarTuple

import numpy as np

from roll.types import Completion, FinishReason, Floats, Ints

S = TypeVar("S", covariant=True)
"""The protocol of the object that runs on each rank."""
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Ranks(ABC, Generic[S]):
    """Processes that run the same strategy, in rank order."""

    replica_size: int = 1
    """Number of consecutive ranks that work on the same sequences."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        """Call a method on some ranks, each with its own arguments. Return the results in the order of `arguments`.

        Raises:
            WorkerFailed: a rank failed or was late. The error has the root cause, or the numbers of the late ranks.
        """

    @property
    def replicas(self) -> int:
        """Number of replicas, over which work is distributed. Each has `replica_size` ranks with the same work."""
        return len(self) // self.replica_size

    def within(self, seconds: float) -> Calls[S]:
        """Return the interface for calls with this deadline. They raise the same errors as `run`."""
        return Calls(self, seconds)

    @property
    def batched(self) -> Ranks[S]:
        """The same ranks, for many concurrent calls, which are batched if that is cheaper."""
        return self

    @property
    def paced(self) -> Ranks[S]:
        """The same ranks, for calls of similar duration. One that takes far longer fails before its deadline."""
        return self


class Calls(Generic[S]):
    """Calls on ranks, all with the same deadline."""

    def __init__(self, ranks: Ranks[S], seconds: float) -> None:
        self._ranks, self._seconds = ranks, seconds

    async def all(
        self,
        method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]] | Callable[Concatenate[S, P], R],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> list[R]:
        """Call a method on every rank with the same arguments. Return the results in rank order."""
        same = positional(method, arguments, named)
        return await self._ranks.run(method.__name__, dict.fromkeys(range(len(self._ranks)), same), self._seconds)

    async def one(
        self,
        rank: int,
        method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]] | Callable[Concatenate[S, P], R],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> R:
        """Call a method on one rank and return its result."""
        return (await self._ranks.run(method.__name__, {rank: positional(method, arguments, named)}, self._seconds))[0]

    async def each(
        self,
        method: Callable[[S, *Ts], Coroutine[Any, Any, R]] | Callable[[S, *Ts], R],
        arguments: Sequence[tuple[*Ts]],
    ) -> list[R]:
        """Call a method on every rank, each with its own arguments. Return the results in rank order."""
        by_rank = dict(zip(range(len(self._ranks)), arguments, strict=True))
        return await self._ranks.run(method.__name__, by_rank, self._seconds)

    async def each_replica(
        self,
        method: Callable[[S, *Ts], Coroutine[Any, Any, R]] | Callable[[S, *Ts], R],
        arguments: Sequence[tuple[*Ts]],
    ) -> list[R]:
        """Call a method on every rank with its replica's arguments. Return the first rank's result of each."""
        size = self._ranks.replica_size
        return firsts(await self.each(method, to_ranks(arguments, size)), size)


def positional(method: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return all arguments as positional ones, in the order of the method's parameters, without `self`."""
    if not named:
        return tuple(arguments)
    bound = inspect.signature(method).bind(None, *arguments, **named)
    assert not bound.kwargs, f"{method.__qualname__} has keyword-only parameters"
    return bound.args[1:]


def to_ranks(arguments: Sequence[T], replica_size: int) -> list[T]:
    """Repeat each replica's value for each of its ranks."""
    return [each for each in arguments for _ in range(replica_size)]


def firsts(results: Sequence[T], replica_size: int) -> list[T]:
    """Select the results of the first rank of each replica."""
    return list(results[::replica_size])


FLOOR_SECONDS = 600.0
"""Smallest limit in seconds for a call, however short previous calls were."""
LONGEST_TIMES = 3.0
"""A call counts as stuck after this many times the duration of the longest previous call."""


class Paced(Ranks[S]):
    """Ranks whose calls fail before the deadline if they take far longer than earlier calls."""

    def __init__(self, ranks: Ranks[S]) -> None:
        self._ranks, self._times, self.replica_size = ranks, CallTimes(), ranks.replica_size

    def __len__(self) -> int:
        return len(self._ranks)

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        began = time.monotonic()
        results = await self._ranks.run(method, arguments, self._times.limit(method, seconds))
        self._times.note(method, time.monotonic() - began)
        return results


class CallTimes:
    """Durations of a role's calls by method, from which the limit of the next call is derived."""

    def __init__(self) -> None:
        self._longest: dict[str, float] = {}

    def note(self, method: str, seconds: float) -> None:
        """Record the duration of a call."""
        self._longest[method] = max(seconds, self._longest.get(method, 0.0))

    def limit(self, method: str, deadline: float) -> float:
        """Return the seconds after which a call counts as stuck.

        They are `LONGEST_TIMES` times the longest earlier call, at least `FLOOR_SECONDS`, and at most the deadline. The
        limit of a method's first call, which may compile, is its deadline.
        """
        longest = self._longest.get(method)
        return deadline if longest is None else min(deadline, max(FLOOR_SECONDS, LONGEST_TIMES * longest))


REASONS = {reason.value: reason for reason in FinishReason}


def encode_value(value: Any) -> bytes:
    """Return the bytes from which `decoded` restores a value. Raises pickle's error, of any type."""
    stream = BytesIO()
    pickler = pickle.Pickler(stream, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {Completion: _as_tuple}
    pickler.dump(value)
    return stream.getvalue()


def decoded(travelled: bytes) -> Any:
    """Return the value that `encoded` turned into these bytes."""
    return pickle.loads(travelled)


def _as_tuple(one: Completion) -> tuple[Any, ...]:
    token_ids, versions = np.asarray(one.token_ids, np.int32), np.asarray(one.policy_versions, np.int32)
    is_one_version = len(versions) and (versions == versions[0]).all()
    log_probs = None if one.log_probs is None else np.asarray(one.log_probs, np.float32).tobytes()
    travels = int(versions[0]) if is_one_version else versions.tobytes()
    routes = None if one.routes is None else (one.routes.shape, np.asarray(one.routes, np.int16).tobytes())
    told = one.finish_reason.value, one.text, routes, one.cached_tokens
    return _put_together, (token_ids.tobytes(), log_probs, travels, *told)


def _put_together(
    token_ids: bytes,
    log_probs: bytes | None,
    versions: int | bytes,
    reason: str,
    text: str,
    routes: tuple[tuple[int, ...], bytes] | None,
    cached_tokens: int,
) -> Completion:
    ids: Ints = np.frombuffer(token_ids, np.int32)
    kept: Floats | None = None if log_probs is None else np.frombuffer(log_probs, np.float32)
    if isinstance(versions, bytes):
        of_tokens: Ints = np.frombuffer(versions, np.int32)
    else:
        of_tokens = np.empty(len(ids), np.int32)
        of_tokens.fill(versions)
    laid = None if routes is None else np.frombuffer(routes[1], np.int16).reshape(routes[0])
    return Completion(ids, kept, of_tokens, REASONS[reason], text, laid, cached_tokens)


LINGER = 0.02
"""Time in seconds for which the first answer waits for others."""
KNOWN = {"roll", "torch", "ray", *sys.stdlib_module_names}
"""Packages whose exceptions are sent as objects. Importing vLLM for one would block the driver for seconds."""
MOST_BYTES = 8 << 20
"""Largest total size in bytes of the answers to one `collect`. The last answer may exceed it."""

Answers = list[tuple[int, bytes, bool]]
"""For each answer: the number of its call, the encoded answer, and whether it is the last one of its call. The encoded
answer is the encoding of a pair: a result and None, or None and a `Failure`. At the end of a stream it is empty."""


class Failure(Exception):
    """An exception that a call raised in the process, as seen by the driver. `str()` returns its traceback."""

    def __init__(self, cause: Exception, text: str) -> None:
        super().__init__(text)
        self.cause, self.text = cause, text

    def __reduce__(self) -> tuple[type[Failure], tuple[Exception, str]]:
        return type(self), (self.cause, self.text)


class BatchedCaller:
    """The driver's side of batched calls on one process. For use in one event loop."""

    def __init__(self, server: Any, reported: Callable[[str, float], AbstractContextManager[None]]) -> None:
        """
        Args:
            server: Ray's handle of the process, which is a `BatchedServer`.
            reported: returns the context of a call with this method and deadline. It converts the call's errors:
                `TimeoutError`, `Failure`, and Ray's error if the process has died.
        """
        self._server, self._reported = server, reported
        self._number = 0
        self._outgoing: list[bytes] = []
        self._arrivals: dict[int, asyncio.Queue[tuple[bytes, bool] | Exception]] = {}
        self._collecting: asyncio.Task[None] | None = None

    async def call(self, method: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        """Call a coroutine of the process and return its result, which is sent like the only item of a stream."""
        async with aclosing(self.stream(method, *arguments, seconds=seconds)) as items:
            return await anext(items)

    async def stream(
        self, method: Callable[[Any, *Ts], AsyncGenerator[R, None]] | str, *arguments: *Ts, seconds: float
    ) -> AsyncGenerator[R, None]:
        """Yield the items of an asynchronous generator of the process as they arrive, the last one within `seconds`.

        Close the stream to drop the remaining items.
        """
        name = method if isinstance(method, str) else method.__name__
        loop, number, arrivals = asyncio.get_running_loop(), self._number, asyncio.Queue()
        with self._reported(name, seconds):
            call, deadline = encode_value((number, name, arguments)), loop.time() + seconds
            self._number += 1
            self._arrivals[number] = arrivals
            if not self._outgoing:
                loop.call_soon(self._post)
            self._outgoing.append(call)
            try:
                while True:
                    if arrivals.empty():  # setting a timer costs more than an item
                        async with asyncio.timeout_at(deadline):
                            arrived = await arrivals.get()
                    else:
                        arrived = arrivals.get_nowait()
                    if isinstance(arrived, Exception):
                        raise arrived
                    answer, is_last = arrived
                    if answer:
                        item, failure = decoded(answer)
                        if failure is not None:
                            raise failure
                        yield item
                    if is_last:
                        return
            finally:
                self._arrivals.pop(number, None)

    def _post(self) -> None:
        calls, self._outgoing = self._outgoing, []
        try:
            self._server.post.remote(calls)
        except Exception as error:
            self._fail(error)
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        try:
            while self._arrivals:  # answered calls are removed at once, so that no superfluous collect is sent
                for number, answer, is_last in await self._server.collect.remote():
                    arrivals = self._arrivals.pop(number, None) if is_last else self._arrivals.get(number)
                    if arrivals is not None:
                        arrivals.put_nowait((answer, is_last))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        for arrivals in self._arrivals.values():
            arrivals.put_nowait(error)


class BatchedServer:
    """The process's side of batched calls: the base class of a Ray actor. For use in one event loop."""

    strategy: Any
    """The object whose methods are called."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way = 0
        self._answers: deque[tuple[int, bytes, bool]] = deque()
        self._size = 0
        self._news = asyncio.Event()

    async def post(self, calls: list[bytes]) -> None:
        """Start some calls."""
        self._under_way += len(calls)
        for call in calls:
            task = asyncio.create_task(self._answer(*decoded(call)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            called = getattr(self.strategy, method)(*arguments)
            if isinstance(called, AsyncGenerator):
                async with aclosing(called):
                    async for item in called:
                        self._put(number, encode_value((item, None)), last=False)
                answer = b""
            else:
                answer = encode_value((await called, None))
        except Exception as error:
            answer = encode_value((None, Failure(portable(error, encode_value, decoded), traceback.format_exc())))
        self._under_way -= 1
        self._put(number, answer, last=True)

    def _put(self, number: int, answer: bytes, last: bool) -> None:
        self._answers.append((number, answer, last))
        self._size += len(answer)
        self._news.set()

    async def collect(self) -> Answers:
        """Wait for at least one answer, and return all that have arrived."""
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
    """Return the error, or a RuntimeError with its text if it cannot be pickled or is not from a package in `KNOWN`."""
    if type(error).__module__.partition(".")[0] not in KNOWN:
        return RuntimeError(f"{type(error).__name__}: {error}")
    try:
        decode(encode(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
