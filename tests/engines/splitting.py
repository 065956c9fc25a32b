"""Record the gradient that DeepSpeed has before each optimizer step."""

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
from roll.backend import MicroBatch, Rank, TrainStepResult
from roll.backend_settings import ModelLoader
from roll.config.schema.model import TrainingConfig
from roll.models.load import load_policy
from tests.engines.training import SEED, TEMPERATURE, VERSION, Case, settings

Work = Mapping[tuple[str, int], tuple[Loss, Sequence[Sequence[MicroBatch]]]]
"""The loss, and the micro-batches of each rank. Key: the name of the loss and the number of micro-batches per rank."""


@dataclass(frozen=True)
class Update:
    """The results of an update on one rank."""

    gradient: Tensor
    """The complete gradient, reduced over all ranks, before the optimizer step."""
    result: TrainStepResult


def updates(
    rank: Rank, case: Case, model: Path, work: Work, load: ModelLoader = load_policy
) -> dict[tuple[str, int], Update]:
    """Make one update for each piece of work. The learning rate is 0, so the model does not change."""
    from deepspeed.utils import safe_get_full_grad

    from roll.training.deepspeed.strategy import DeepSpeedTrain

    still = TrainingConfig.model_validate({"learning_rate": 0.0})
    strategy = DeepSpeedTrain(dataclasses.replace(settings(case, model, SEED, load), training=still), rank)
    engine: Any = strategy._engine
    trains = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    seen: list[Tensor] = []
    # With ZeRO-0 and ZeRO-1, `step` reduces the gradients over the ranks before it calls `_take_model_step`.
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


def gradients(
    rank: Rank, case: Case, model: Path, work: Work, load: ModelLoader = load_policy
) -> dict[tuple[str, int], Tensor]:
    """Return the complete gradient of each piece of work. The arguments are those of `updates`."""
    return {name: update.gradient for name, update in updates(rank, case, model, work, load).items()}


def updates_by_case(rank: Rank, cases: Sequence[Case], model: Path, work: Work) -> list[dict[tuple[str, int], Update]]:
    """Call `updates` for several cases in one process group."""
    with mock.patch.object(torch.distributed, "destroy_process_group"):
        seen = [updates(rank, case, model, work) for case in cases]
    torch.distributed.destroy_process_group()
    return seen


def gradients_by_case(
    rank: Rank, cases: Sequence[Case], model: Path, work: Work
) -> list[dict[tuple[str, int], Tensor]]:
    """Call `gradients` for several cases in one process group."""
    by_case = updates_by_case(rank, cases, model, work)
    return [{name: update.gradient for name, update in seen.items()} for seen in by_case]
