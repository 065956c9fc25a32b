"""Processes that train together in a benchmark, one for each rank."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from roll.config.derived.devices import visible_devices


def on_ranks(train: Callable[..., Any], ranks: int, device: str, *given: Any) -> list[Any]:
    """Call `train(*given, rank)` in a process of its own for each rank, with a GPU of its own if `device` is `cuda`.

    Returns:
        What each rank returned.

    Raises:
        ProcessRaisedException: A rank failed. The others, which would wait for it, were ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(  # pyright: ignore[reportPrivateImportUsage]
            _on_rank, (train, ranks, device, given, Path(folder)), nprocs=ranks
        )
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]


def _on_rank(
    rank: int, train: Callable[..., Any], ranks: int, device: str, given: tuple[Any, ...], folder: Path
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "DS_ACCELERATOR": device}
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices([rank], os.environ.get("CUDA_VISIBLE_DEVICES"))
    if device == "cpu":
        torch.set_num_threads(1)
    (folder / str(rank)).write_bytes(pickle.dumps(train(*given, rank)))
