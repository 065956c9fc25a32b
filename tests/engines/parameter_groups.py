"""Code that `test_parameter_groups.py` runs on each rank: train with groups of different sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from roll.backend import Rank, TrainStepResult
from roll.training.deepspeed import setup
from tests.engines.training import LOSS, SEED, TEMPERATURE, VERSION, Case, Work, tensors_of, trainer

USUAL = setup.LARGEST_GROUP
SMALL = 2**15
"""Most parameters of a group: less than two matrices of the small model, and less than its embedding."""


@dataclass(frozen=True)
class Grouped:
    """The results of one rank. Weights are complete on rank 0 and empty on other ranks."""

    sizes: list[int]
    """Number of parameters of each group."""
    result: TrainStepResult
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Resumed:
    """The results of one rank. There are universal checkpoints of AdamW only."""

    own: Grouped
    """With many groups, from a checkpoint of many."""
    split: Grouped | None
    """With many groups, from a universal checkpoint of few."""
    joined: Grouped | None
    """With few groups, from a universal checkpoint of many."""
    refusal: str
    """The error of loading a checkpoint of few groups with many."""


@contextmanager
def grouped(largest: int, case: Case, model: Path, rank: Rank, seed: int) -> Iterator[Any]:
    """Yield the trainer of a case, with groups of at most `largest` parameters."""
    with mock.patch.object(setup, "LARGEST_GROUP", largest), trainer(case, model, rank, seed) as strategy:
        yield strategy


def trained(strategy: Any, work: Work, folder: Path) -> Grouped:
    """Make three updates."""
    zero = strategy._engine.optimizer
    groups = zero.bf16_groups if hasattr(zero, "bf16_groups") else zero.bit16_groups
    result = strategy.train_step(work.second, LOSS, TEMPERATURE, VERSION)
    sizes = [sum(parameter.numel() for parameter in group) for group in groups]
    return Grouped(sizes, result, tensors_of(strategy, False, folder))


def train_grouped(
    rank: Rank, cases: Sequence[Case], model: Path, works: Sequence[Work], folder: Path
) -> list[tuple[Grouped, Grouped]]:
    """For each case, train with few and with many groups from the same checkpointed update."""
    out = []
    for case in cases:
        found = []
        for largest in (USUAL, SMALL):
            place = folder / case.name / str(largest) / "checkpoints" / "step_1"
            place.mkdir(parents=True, exist_ok=True)
            with grouped(largest, case, model, rank, SEED) as strategy:
                strategy.train_step(works[rank.rank].first, LOSS, TEMPERATURE, VERSION)
                strategy.save(place)
                found.append(trained(strategy, works[rank.rank], place))
        out.append((found[0], found[1]))
    torch.distributed.destroy_process_group()
    return out


def resume_grouped(
    rank: Rank, cases: Sequence[Case], model: Path, works: Sequence[Work], folder: Path
) -> list[Resumed]:
    """For each case, resume with few and with many groups from checkpoints of the same and of others."""
    out = []
    for case in cases:
        few, many = (folder / case.name / str(largest) for largest in (USUAL, SMALL))

        def resumed(strategy: Any, checkpoint: Path) -> Grouped:
            strategy.load(checkpoint)
            return trained(strategy, works[rank.rank], folder)

        is_converted, refusal = (few / "universal").is_dir(), ""
        with grouped(SMALL, case, model, rank, SEED + 1) as strategy:
            try:
                strategy.load(few / "checkpoints" / "step_1")
            except Exception as error:
                refusal = f"{type(error).__name__}: {error}"
            own = resumed(strategy, many / "checkpoints" / "step_1")
            split = resumed(strategy, few / "universal") if is_converted else None
        with grouped(USUAL, case, model, rank, SEED + 1) as strategy:
            joined = resumed(strategy, many / "universal") if is_converted else None
        out.append(Resumed(own, split, joined, refusal))
    torch.distributed.destroy_process_group()
    return out
