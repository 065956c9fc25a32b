"""Reward models: from the configuration to the parts of their loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from roll.algorithms.losses import Loss
from roll.algorithms.ranking import BradleyTerry
from roll.config.schema.offline import RewardModelConfig
from roll.data.example_batch import given_batch
from roll.data.examples import ExampleSequence, ExampleSet
from roll.data.sampler import ExampleSampler
from roll.models.score import pad_token, scored_token
from roll.pipeline import offline
from roll.pipeline.interrupt import Interrupt
from roll.pipeline.meter import meter_of
from roll.pipeline.position import Position
from roll.pipeline.roles import Roles, make_scores, model_path
from roll.pipeline.run_context import Prepared, RunContext
from roll.pipeline.wire_offline import GivenRows, evaluation, parts, prepare_rows, steps_of
from roll.types import Metrics, TrainBatch


def prepare(config: RewardModelConfig) -> Prepared:
    """Check the model's files and prepare all pairs; the loop, ready to be given its surroundings.

    Raises:
        BadInput: model or data cannot be used.
    """
    rows = prepare_rows(config, "pairs")
    model_args = config.reward_train.model_args
    pad = pad_token(model_path(config, model_args), model_args)
    return Prepared(partial(_loop, config, rows, pad), rows.training.identity, len(rows.training))


async def _loop(
    config: RewardModelConfig, rows: GivenRows, pad: int | None, roles: Roles, context: RunContext, interrupt: Interrupt
) -> Position:
    batch_size = context.plan.batch.sequences_per_step
    steps = steps_of(config, len(rows.training), batch_size)
    reward_train = roles.actor_train("reward_train", config.reward_train, steps, temperature=1.0, factory=make_scores)
    meter = meter_of(roles, context.plan, await roles.start())

    sampler = ExampleSampler(len(rows.training), config.seed)
    position = await context.checkpointer.restore(reward_train, sampler, last_step=steps)
    evaluate = evaluation(config, rows, partial(make_batch, rows.held_out, pad), reward_train.evaluate, held_out_metrics, batch_size, steps)
    run = parts(context, meter, interrupt, reward_train.train_step, sampler, partial(make_batch, rows.training, pad), evaluate, steps)
    return await offline.train(run, position)


async def make_batch(rows: ExampleSet | None, pad: int | None, numbers: Sequence[int]) -> tuple[TrainBatch, Loss]:
    """Pairs, of each sequence the token at which its score is read."""
    assert rows is not None
    examples = [rows.example(number) for number in numbers]
    scored = [replace(example, sequences=tuple(_scored(sequence, pad) for sequence in example.sequences)) for example in examples]
    return given_batch(scored), BradleyTerry()


def _scored(sequence: ExampleSequence, pad: int | None) -> ExampleSequence:
    return ExampleSequence(sequence.token_ids, scored_token(sequence.token_ids, pad))


def held_out_metrics(name: str, metrics: Metrics) -> Metrics:
    """Loss, and how often and by how much the chosen response scores higher."""
    return {
        f"val/{name}/loss": metrics["reward_model/loss"],
        f"val/{name}/accuracy": metrics["reward_model/accuracy"],
        f"val/{name}/reward_margin": metrics["reward_model/margin"],
    }
