"""Typed calls on the ranks of a group. Methods are passed as attributes of their protocol, so that arguments and
results are type-checked.

    await group.within(seconds).all(GenerateStrategy.load_bucket, bucket)

Only the method's name and its arguments are sent to a rank. Plain methods and coroutines are called in the same way.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, TypeVarTuple

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
        """Number of replicas, over which work is distributed. Each has `replica_size` consecutive ranks, which do the
        same work.
        """
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
        """The same ranks, for calls of similar duration. A call that takes far longer than earlier ones fails before
        its deadline.
        """
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
        """Call a method on every rank with the arguments of its replica. Return the results of the first rank of each
        replica.
        """
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
