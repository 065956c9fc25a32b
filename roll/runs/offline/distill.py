"""Wires distillation into the offline loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from roll.algorithms.divergence import Distillation
from roll.algorithms.losses import Loss
from roll.config.plan.plan import Plan
from roll.config.schema.offline import DistillConfig
from roll.data.example_batch import given_batch
from roll.data.examples import Example
from roll.runs.offline.batches import Models
from roll.runs.offline.wiring import OfflinePipeline, OtherModel, prepare_rows
from roll.runs.role_models import check_same_tokens
from roll.runs.roles import Roles
from roll.runs.run_context import PreparedRun
from roll.runs.teacher import teaching
from roll.training.actor_train import ActorTrain
from roll.types import Metrics, TrainBatch


def prepare_distill(config: DistillConfig) -> PreparedRun:
    """Check the models' files, compare their vocabularies and prepare all examples. Return the loop, ready to run.

    Raises:
        BadInput: a model or the data cannot be used.
    """
    check_same_tokens(config, config.student.model_args, config.teacher.model_args, "teacher")
    ends = teaching(config, config.student.model_args, [config.teacher.model_args])
    rows = prepare_rows(config, "responses")

    def teacher(plan: Plan, roles: Roles, student: ActorTrain) -> OtherModel:
        return OtherModel("teacher", part="teacher", ask=roles.teacher("teacher", config.teacher, ends.wrap).states)

    make = partial(distill_batch, Distillation(config.distill_loss_weight))
    return OfflinePipeline(rows, make, distill_metrics, ends.load, teacher).prepared(config)


async def distill_batch(loss: Distillation, examples: Sequence[Example], models: Models) -> tuple[TrainBatch, Loss]:
    """Return the batch of the rows, including the teacher's states for the responses, and its loss."""
    assert models.other is not None, "distillation needs a teacher"
    batch = given_batch(examples)
    return replace(batch, teacher_states=await models.other(batch.sequences)), loss


def distill_metrics(name: str, metrics: Metrics) -> Metrics:
    """Return the validation metrics: the whole loss, and the divergence alone."""
    return {f"val/{name}/loss": metrics["distill/loss"], f"val/{name}/divergence": metrics["distill/divergence"]}
