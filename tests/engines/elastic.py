"""Code that `test_elastic.py` and `test_nvme.py` run on each rank: train, save, load and continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll.backend import Rank, TrainStepResult
from tests.engines.training import LOSS, SEED, TEMPERATURE, VERSION, Case, Work, tensors_of, trainer


@dataclass(frozen=True)
class Trained:
    """The results of one rank. Weights are complete on rank 0 and empty on other ranks."""

    saved: dict[str, Tensor]
    """Weights at the checkpoint, any adapter merged in."""
    adapter: dict[str, Tensor]
    curve: list[TrainStepResult]
    """Results of the three updates that follow the checkpoint."""
    weights: dict[str, Tensor]
    """Weights after these updates."""


def checkpoint_of(folder: Path, case: Case) -> Path:
    """Return the path of the single checkpoint in the run folder of a case."""
    return folder / case.name / "checkpoints" / "step_1"


def continue_training(strategy: Any, case: Case, work: Work, folder: Path) -> Trained:
    """Record the current weights, then make three updates."""
    saved = tensors_of(strategy, False, folder)
    adapter = tensors_of(strategy, True, folder) if case.lora else {}
    curve = [
        strategy.train_step([update], LOSS, TEMPERATURE, VERSION + 1 + number)
        for number, update in enumerate(work.second)
    ]
    return Trained(saved, adapter, curve, tensors_of(strategy, False, folder))


def train_and_save(
    rank: Rank, cases: Sequence[Case], model: Path, works: Sequence[Work], folder: Path
) -> list[Trained]:
    """For each case, make one update, save a checkpoint and make three more updates."""
    out = []
    for case in cases:
        checkpoint_of(folder, case).mkdir(parents=True, exist_ok=True)
        with trainer(case, model, rank, SEED) as strategy:
            strategy.train_step(works[rank.rank].first, LOSS, TEMPERATURE, VERSION)
            strategy.save(checkpoint_of(folder, case))
            out.append(continue_training(strategy, case, works[rank.rank], folder))
    torch.distributed.destroy_process_group()
    return out


def load_and_train(
    rank: Rank, cases: Sequence[Case], model: Path, works: Sequence[Work], folder: Path
) -> list[tuple[Trained, str]]:
    """For each case, build a trainer with another seed, resume from the universal checkpoint and make three updates.

    Also return the error that loading the original, unconverted checkpoint raises.
    """
    out = []
    for case in cases:
        with trainer(case, model, rank, SEED + 1) as strategy:
            refusal = ""
            try:
                strategy.load(checkpoint_of(folder, case))
            except Exception as error:
                refusal = f"{type(error).__name__}: {error}"
            strategy.load(folder / case.name / "universal")
            out.append((continue_training(strategy, case, works[rank.rank], folder), refusal))
    torch.distributed.destroy_process_group()
    return out
