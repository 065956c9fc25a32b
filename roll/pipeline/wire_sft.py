"""SFT: from the configuration to the parts of its loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from roll.algorithms.losses import Loss, NegativeLogLikelihood
from roll.config.schema.offline import SftConfig
from roll.data.example_batch import given_batch
from roll.data.examples import ExampleSet
from roll.data.sampler import ExampleSampler
from roll.pipeline import offline
from roll.pipeline.interrupt import Interrupt
from roll.pipeline.meter import meter_of
from roll.pipeline.position import Position
from roll.pipeline.roles import Roles
from roll.pipeline.run_context import Prepared, RunContext
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


async def _loop(config: SftConfig, rows: GivenRows, roles: Roles, context: RunContext, interrupt: Interrupt) -> Position:
    batch_size = context.plan.batch.sequences_per_step
    steps = steps_of(config, len(rows.training), batch_size)
    actor_train = roles.actor_train("sft_train", config.sft_train, steps, temperature=1.0)
    meter = meter_of(roles, context.plan, await roles.start())

    sampler = ExampleSampler(len(rows.training), config.seed)
    position = await context.checkpointer.restore(actor_train, sampler, last_step=steps)
    evaluate = evaluation(config, rows, partial(make_batch, rows.held_out), actor_train.evaluate, held_out_metrics, batch_size, steps)
    run = parts(context, meter, interrupt, actor_train.train_step, sampler, partial(make_batch, rows.training), evaluate, steps)
    return await offline.train(run, position)


async def make_batch(rows: ExampleSet | None, numbers: Sequence[int]) -> tuple[TrainBatch, Loss]:
    """Nothing needs to be asked about the rows: the batch is what they hold."""
    assert rows is not None
    return given_batch([rows.example(number) for number in numbers]), NegativeLogLikelihood()


def held_out_metrics(name: str, metrics: Metrics) -> Metrics:
    """Cross-entropy in nats a token, and its exponential."""
    loss = metrics["sft/loss"]
    return {f"val/{name}/loss": loss, f"val/{name}/perplexity": float(np.exp(loss))}
