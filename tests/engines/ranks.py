"""Run a function on the ranks of a gloo process group, each in its own process, and collect the return values."""

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
"""A function that is called with a `Rank` and further arguments."""


def free_port() -> int:
    """Return a TCP port of this host that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(scenario: Scenario, world_size: int, folder: Path, *arguments: Any) -> list[Any]:
    """Run `scenario(rank, *arguments)` on each rank and return the results by rank. No process is left on return or
    error.
    """
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
    """Wait until all ranks have succeeded, or raise an error with the traceback of the first that failed."""

    def alive() -> list[int]:
        return [rank for rank, process in enumerate(processes) if process.is_alive()]

    limits.until(
        lambda: not alive() or any(process.exitcode for process in processes), "all ranks have ended", limits.RUN, alive
    )
    for rank, process in enumerate(processes):
        if process.exitcode:
            file = folder / f"failure{rank}.txt"
            raise RuntimeError(
                f"rank {rank} ended with {process.exitcode}:\n{file.read_text() if file.exists() else 'no traceback'}"
            )


def _on_rank(
    scenario: Scenario, rank: int, world_size: int, port: int, folder: Path, arguments: tuple[Any, ...]
) -> None:
    # The variables that the worker layer sets before it imports a strategy's module.
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    try:
        import torch

        from roll.backend import Rank

        torch.set_num_threads(1)
        result = scenario(Rank("actor_train", rank, world_size, "127.0.0.1", port, "cpu", limits.START), *arguments)
        (folder / f"result{rank}.pkl").write_bytes(pickle.dumps(result))
    except BaseException:
        (folder / f"failure{rank}.txt").write_text(traceback.format_exc())
        raise
    # Exit at once, like a worker, which is killed after `close`: the gloo groups that DeepSpeed keeps may abort at
    # interpreter shutdown.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
