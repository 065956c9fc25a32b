"""A replacement for `WorkerGroup` without Ray: ranks in separate processes, which serve one strategy after another."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from roll.backend_settings import Settings
from roll.ray.batching import Ranks
from tests import limits
from tests.engines.ranks import free_port

BUILD = "build"
"""Name of the request to build a new strategy."""


class ServedRanks(Ranks[Any]):
    """The part of `WorkerGroup` that the facades use."""

    def __init__(self, pipes: Sequence[Connection], replica_size: int = 1) -> None:
        self._pipes, self.replica_size = pipes, replica_size

    def __len__(self) -> int:
        return len(self._pipes)

    def build(self, settings: Settings[Any]) -> None:
        """Replace the current strategy with a new one on all ranks."""
        asyncio.run(self.run(BUILD, dict.fromkeys(range(len(self)), (settings,)), limits.START))

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        """See `Ranks.run`."""
        for rank, given in arguments.items():
            self._pipes[rank].send((method, given))
        return [await asyncio.to_thread(_answer, self._pipes[rank]) for rank in arguments]


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(limits.START):
        raise TimeoutError("a rank did not answer in time")
    good, value = pipe.recv()
    if not good:
        raise RuntimeError(value)
    return value


@contextmanager
def served_ranks(role: str, world_size: int, replica_size: int = 1) -> Iterator[ServedRanks]:
    """Start the ranks together, and end all of their processes on exit."""
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
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    import torch

    from roll.backend import Rank
    from roll.weight_sync.transfer import BucketSender

    torch.set_num_threads(1)
    rank, strategy, sender = Rank(role, number, world_size, "127.0.0.1", port, "cpu", limits.START), None, None
    while True:
        method, arguments = pipe.recv()
        try:
            if method == BUILD:
                if strategy is not None:
                    with mock.patch.object(torch.distributed, "destroy_process_group"):
                        strategy.close()
                    strategy = sender = None
                    gc.collect()
                strategy = arguments[0].build(rank)
                sender = BucketSender(strategy, number, torch.device("cpu"))
                pipe.send((True, None))
            else:
                # Bind the strategy to no other name: it must be freed before the next one is built.
                pipe.send((True, getattr(strategy if hasattr(strategy, method) else sender, method)(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
