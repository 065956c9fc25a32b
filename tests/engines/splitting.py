"""Gradients as DeepSpeed has them before it steps, by what was trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from roll.algorithms.losses import Loss
from roll.config.schema.model import TrainingConfig
from roll.models.load import load_policy
from roll.strategies.base import MicroBatch, Rank, TrainResult
from roll.strategies.settings import ModelLoader
from tests.engines.training import SEED, TEMPERATURE, VERSION, Case, settings

Work = Mapping[tuple[str, int], tuple[Loss, Sequence[Sequence[MicroBatch]]]]
"""By name of the loss and number of micro-batches: the loss, and by rank its micro-batches."""


@dataclass(frozen=True)
class Update:
    """What one rank knows of an update before it is made."""

    gradient: Tensor
    """Whole, over all ranks."""
    result: TrainResult


def updates(rank: Rank, case: Case, model: Path, work: Work, load: ModelLoader = load_policy) -> dict[tuple[str, int], Update]:
    """Each piece of work as an update. The learning rate is 0, so the model stays as it is."""
    from deepspeed.utils import safe_get_full_grad

    from roll.strategies.deepspeed_train import DeepSpeedTrain

    still = TrainingConfig.model_validate({"learning_rate": 0.0})
    strategy = DeepSpeedTrain(dataclasses.replace(settings(case, model, SEED, load), training=still), rank)
    engine: Any = strategy._engine
    trains = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    seen: list[Tensor] = []
    # Below ZeRO-2 the ranks' gradients meet in `step`, before the model's own.
    take_step = engine._take_model_step

    def look_and_step(*arguments: Any) -> None:
        whole = [safe_get_full_grad(parameter) for parameter in trains]
        seen.append(torch.cat([gradient.flatten().double() for gradient in whole if gradient is not None]))
        take_step(*arguments)

    out = {}
    with mock.patch.object(engine, "_take_model_step", look_and_step):
        for name, (loss, by_rank) in work.items():
            result = strategy.train_step([by_rank[rank.rank]], loss, TEMPERATURE, VERSION)
            out[name] = Update(seen.pop(), result)
    strategy.close()
    return out


def gradients(rank: Rank, case: Case, model: Path, work: Work, load: ModelLoader = load_policy) -> dict[tuple[str, int], Tensor]:
    """The whole gradient of each piece of work, over all ranks. Arguments as of `updates`."""
    return {name: update.gradient for name, update in updates(rank, case, model, work, load).items()}


def updates_by_case(rank: Rank, cases: Sequence[Case], model: Path, work: Work) -> list[dict[tuple[str, int], Update]]:
    """Updates for several cases, in one process group."""
    with mock.patch.object(torch.distributed, "destroy_process_group"):
        seen = [updates(rank, case, model, work) for case in cases]
    torch.distributed.destroy_process_group()
    return seen


def gradients_by_case(rank: Rank, cases: Sequence[Case], model: Path, work: Work) -> list[dict[tuple[str, int], Tensor]]:
    """Gradients for several cases, in one process group."""
    by_case = updates_by_case(rank, cases, model, work)
    return [{name: update.gradient for name, update in seen.items()} for seen in by_case]
