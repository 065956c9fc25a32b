"""Ranks in processes of their own that do what a facade asks of them, one strategy after another; a `WorkerGroup` without Ray."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from tests import limits
from tests.engines.ranks import free_port

Factory = Callable[[Any, Any], Any]
"""Settings and a `Rank` to a strategy."""


class ServedRanks:
    """Implements what the facades use of `WorkerGroup`."""

    def __init__(self, pipes: Sequence[Connection], replica_size: int = 1) -> None:
        self._pipes, self._replica_size = pipes, replica_size

    def __len__(self) -> int:
        return len(self._pipes)

    @property
    def replicas(self) -> int:
        """See `WorkerGroup`."""
        return len(self) // self._replica_size

    def build(self, factory: Factory, settings: Any) -> None:
        """Another strategy in the place of the one before."""
        asyncio.run(self.each("build", [(factory, settings)] * len(self), limits.START))

    async def each(self, method: str, arguments: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
        """See `WorkerGroup`."""
        for pipe, rank in zip(self._pipes, arguments, strict=True):
            pipe.send((method, rank))
        return [await asyncio.to_thread(_answer, pipe) for pipe in self._pipes]

    async def each_replica(self, method: str, arguments: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
        """See `WorkerGroup`."""
        from roll.workers.group import firsts, to_ranks  # here, as the ranks' own processes need no Ray

        return firsts(await self.each(method, to_ranks(arguments, self._replica_size), seconds), self._replica_size)

    async def all(self, method: str, *arguments: Any, seconds: float) -> list[Any]:
        """See `WorkerGroup`."""
        return await self.each(method, [arguments] * len(self), seconds)


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(limits.START):
        raise TimeoutError("a rank is late")
    good, value = pipe.recv()
    if not good:
        raise RuntimeError(value)
    return value


@contextmanager
def served_ranks(role: str, world_size: int, replica_size: int = 1) -> Iterator[ServedRanks]:
    """Started together; every process is gone afterwards, whatever happened."""
    context = multiprocessing.get_context("spawn")
    port, ends, processes = free_port(), [], []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, role, rank, world_size, port))
            process.start()
            ends.append(ours)
            processes.append(process)
        yield ServedRanks(ends, replica_size)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, role: str, number: int, world_size: int, port: int) -> None:
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    import torch

    from roll.strategies.base import Rank

    torch.set_num_threads(1)
    rank, strategy = Rank(role, number, world_size, "127.0.0.1", port, "cpu", limits.START), None
    while True:
        method, arguments = pipe.recv()
        try:
            if method == "build":
                if strategy is not None:
                    with mock.patch.object(torch.distributed, "destroy_process_group"):
                        strategy.close()
                    strategy = None
                    gc.collect()
                factory, settings = arguments
                strategy = factory(settings, rank)
                pipe.send((True, None))
            else:
                pipe.send((True, getattr(strategy, method)(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
