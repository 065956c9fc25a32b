"""Runs a function on the ranks of a gloo process group, each in a process of its own, and brings back what it returns."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests import limits

Scenario = Callable[..., Any]
"""Called with a `Rank` and the arguments."""


def free_port() -> int:
    """A TCP port of this host that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(scenario: Scenario, world_size: int, folder: Path, *arguments: Any) -> list[Any]:
    """What `scenario(rank, *arguments)` returned on each rank. Every process is gone afterwards, whatever happened."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    port = free_port()
    processes: list[BaseProcess] = []
    try:
        for rank in range(world_size):
            process = context.Process(target=_on_rank, args=(scenario, rank, world_size, port, folder, arguments))
            process.start()
            processes.append(process)
        _wait(processes, folder)
        results = []
        for rank in range(world_size):
            file = folder / f"result{rank}.pkl"
            results.append(pickle.loads(file.read_bytes()))
            file.unlink()
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


def _wait(processes: list[BaseProcess], folder: Path) -> None:
    """Until all ranks ended well. The first that did not is an error with its traceback."""

    def alive() -> list[int]:
        return [rank for rank, process in enumerate(processes) if process.is_alive()]

    limits.until(lambda: not alive() or any(process.exitcode for process in processes), "all ranks have ended", limits.RUN, alive)
    for rank, process in enumerate(processes):
        if process.exitcode:
            file = folder / f"failure{rank}.txt"
            raise RuntimeError(f"rank {rank} ended with {process.exitcode}:\n{file.read_text() if file.exists() else 'it left no word'}")


def _on_rank(scenario: Scenario, rank: int, world_size: int, port: int, folder: Path, arguments: tuple[Any, ...]) -> None:
    # What the worker layer sets before a strategy's module is imported.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    try:
        import torch

        from roll.strategies.base import Rank

        torch.set_num_threads(1)
        result = scenario(Rank("actor_train", rank, world_size, "127.0.0.1", port, "cpu", limits.START), *arguments)
        (folder / f"result{rank}.pkl").write_bytes(pickle.dumps(result))
    except BaseException:
        (folder / f"failure{rank}.txt").write_text(traceback.format_exc())
        raise
    # As a worker that was closed, which is killed: gloo's groups that DeepSpeed keeps were seen to abort as an interpreter came to its end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
