"""Trains one cell of the DeepSpeed matrix with roll's trainer and returns its loss curve."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import deepspeed
import torch

from benchmarks.deepspeed_table import ZEROPP, Cell
from benchmarks.deepspeed_tasks import (
    MAX_GRAD_NORM,
    SEED,
    TASKS,
    TOKEN_BUDGET,
    UPDATES,
    Folders,
    batches,
    model_args,
    training_args,
)
from roll.algorithms.divergence import Divergence
from roll.backend import Rank
from roll.config.schema.model import ModelConfig
from roll.engines.hf.settings import HfScoreSettings
from roll.engines.hf.strategy import HfScore
from roll.models.load import load_policy
from roll.models.packed import PackedModel
from roll.models.student import PackedTeacher, student_loader
from roll.models.value import load_scores, load_values
from roll.training.actor_train import TrainShape, merge, micro_batches_of
from roll.training.deepspeed.settings import DeepSpeedConfig, TrainSettings
from roll.training.deepspeed.strategy import DeepSpeedTrain
from roll.types import Metrics, TrainBatch

SKIPPED = "skipped_updates"


def trained(cell: Cell, folders: Folders, rank: Rank) -> tuple[list[float], int]:
    """Return the loss curve, which is the same on every rank, and the number of updates that fp16 skipped. The process
    group stays open.

    Raises:
        ConfigError: this machine lacks what the cell needs.
    """
    settings = TrainSettings(
        str(folders.model),
        model_args(cell),
        training_args(cell),
        deepspeed_keys(cell, folders),
        MAX_GRAD_NORM,
        total_updates=UPDATES,
        token_budget=TOKEN_BUDGET,
        seed=SEED,
        load=loader(cell, folders),
    )
    given = batches(cell.pipeline)
    if cell.pipeline == "distill":
        given = with_teacher_states(given, cell, folders, rank)
    strategy = DeepSpeedTrain(settings, rank)
    if cell.pipeline == "dpo":  # the policy before training, or without its adapter, is the reference
        given = [
            replace(batch, ref_log_probs=strategy.log_probs([batch.sequences], 1.0, adapter=False)[0])
            for batch in given
        ]
    curve, skipped = [], 0
    for number in range(UPDATES):
        said, again = update(strategy, cell, given[number % len(given)], rank, number)
        curve.append(said[TASKS[cell.pipeline].metric])
        skipped += again
    with mock.patch.object(torch.distributed, "destroy_process_group"):
        strategy.close()
    del strategy
    gc.collect()
    return curve, skipped


def update(strategy: DeepSpeedTrain, cell: Cell, batch: TrainBatch, rank: Rank, number: int) -> tuple[Metrics, int]:
    """Return the metrics of one update, and the number of skipped attempts. fp16 skips until its loss scale is low
    enough.
    """
    task = TASKS[cell.pipeline]
    shape = TrainShape(1, 1, TOKEN_BUDGET, task.loss_agg_mode, temperature=1.0)
    mine, tries = micro_batches_of(batch, range(len(batch)), rank.world_size, shape)[rank.rank], 0
    while True:
        everyone: list[Any] = [None] * rank.world_size
        torch.distributed.all_gather_object(everyone, strategy.train_step([mine], task.loss, 1.0, number))
        said = merge(everyone)
        if not said[f"{task.loss.metric_prefix}/{SKIPPED}"]:
            return said, tries
        tries += 1


def machine(device: str) -> str:
    """Return a text with the name of the devices and the versions of torch and DeepSpeed."""
    name = f"two {torch.cuda.get_device_name(0)}" if device == "cuda" else "two ranks of one CPU"
    return f"{name}, torch {torch.__version__}, DeepSpeed {deepspeed.__version__}"


def deepspeed_keys(cell: Cell, folders: Folders) -> DeepSpeedConfig:
    """Return the `strategy_config` of a cell."""
    zero: dict[str, Any] = {"stage": cell.stage} | ZEROPP.get(cell.zeropp, {})
    if cell.stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # shard tensors as small as these too
    place: dict[str, Any] = {"device": "cpu"}
    if cell.offload == "nvme":
        place = {"device": "nvme", "nvme_path": str(folders.swap), "buffer_count": 5}
    if cell.offload != "none":
        zero["offload_optimizer"] = place
    if cell.offload in ("all", "nvme"):
        zero["offload_param"] = place | ({"buffer_size": 10**6} if cell.offload == "nvme" else {})
    return DeepSpeedConfig.model_validate({"zero_optimization": zero})


def loader(cell: Cell, folders: Folders) -> Callable[[str, ModelConfig, int], PackedModel]:
    """Return the function that builds the model of a pipeline."""
    if cell.pipeline == "distill":
        return student_loader(str(folders.teacher), teacher_args(cell), Divergence())
    return {"critic": load_values, "reward_model": load_scores}.get(cell.pipeline, load_policy)


def teacher_args(cell: Cell) -> ModelConfig:
    """Return the keys of the teacher, which has the student's precision."""
    return ModelConfig.model_validate({"dtype": cell.dtype, "compile_layers": False})


def with_teacher_states(given: list[TrainBatch], cell: Cell, folders: Folders, rank: Rank) -> list[TrainBatch]:
    """Return the batches with the teacher's states."""
    alone = replace(rank, role="teacher", rank=0, world_size=1)
    teacher = HfScore(HfScoreSettings(str(folders.teacher), teacher_args(cell), PackedTeacher), alone)
    out = [replace(batch, teacher_states=teacher.states([batch.sequences])[0]) for batch in given]
    teacher.close()
    return out
