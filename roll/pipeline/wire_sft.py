"""SFT: from the configuration to the parts of its loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from roll.algorithms.losses import Loss, NegativeLogLikelihood
from roll.config.schema.offline import SftConfig
from roll.data.examples import ExampleSet
from roll.data.lessons import given_batch
from roll.data.sampler import LessonSampler
from roll.pipeline import offline
from roll.pipeline.interrupt import Interrupt
from roll.pipeline.meter import meter_of
from roll.pipeline.position import Position
from roll.pipeline.roles import Roles
from roll.pipeline.stage import Prepared, Stage
from roll.pipeline.wire_offline import GivenRows, evaluation, parts, prepare_rows, steps_of
from roll.types import Metrics, TrainBatch


def prepare(config: SftConfig) -> Prepared:
    """Check the model's files and prepare all examples; the loop, ready to be given its surroundings.

    Raises:
        BadInput: model or data cannot be used.
    """
    kind = "turns" if config.loss_on == "assistant" else "responses"
    rows = prepare_rows(config, kind, learn_all=config.loss_on == "all")
    return Prepared(partial(_loop, config, rows), rows.training.identity, len(rows.training))


async def _loop(config: SftConfig, rows: GivenRows, roles: Roles, stage: Stage, interrupt: Interrupt) -> Position:
    batch_size = stage.plan.batch.sequences_per_step
    steps = steps_of(config, len(rows.training), batch_size)
    actor_train = roles.actor_train("sft_train", config.sft_train, steps, temperature=1.0)
    meter = meter_of(roles, stage.plan, await roles.start())

    sampler = LessonSampler(len(rows.training), config.seed)
    position = await stage.keeper.restore(actor_train, sampler, last_step=steps)
    evaluate = evaluation(config, rows, partial(study, rows.held_out), actor_train.evaluate, held_out_metrics, batch_size, steps)
    run = parts(stage, meter, interrupt, actor_train.train_step, sampler, partial(study, rows.training), evaluate, steps)
    return await offline.train(run, position)


async def study(rows: ExampleSet | None, numbers: Sequence[int]) -> tuple[TrainBatch, Loss]:
    """Nothing needs to be asked about the rows: the batch is what they hold."""
    assert rows is not None
    return given_batch([rows.lesson(number) for number in numbers]), NegativeLogLikelihood()


def held_out_metrics(name: str, metrics: Metrics) -> Metrics:
    """Cross-entropy in nats a token, and its exponential."""
    loss = metrics["sft/loss"]
    return {f"val/{name}/loss": loss, f"val/{name}/perplexity": float(np.exp(loss))}
