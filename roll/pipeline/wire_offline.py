"""What the pipelines that learn from given rows have in common: from the configuration to the parts of their loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from roll.algorithms.losses import Loss
from roll.config.derived.batch import learner
from roll.config.derived.placement import model_roles
from roll.config.schema.model import DataConfig
from roll.config.schema.offline import OfflineConfig
from roll.data.examples import WORDLESS, ExampleSet, Kind, Limits, Part, prepare_examples
from roll.data.remarks import remark
from roll.data.sampler import ExampleSampler
from roll.models.load import check_readable, load_tokenizer
from roll.pipeline.interrupt import Interrupt
from roll.pipeline.learning import Update
from roll.pipeline.meter import Meter
from roll.pipeline.offline import Offline
from roll.pipeline.roles import model_path
from roll.pipeline.run_context import RunContext
from roll.strategies.base import TrainResult
from roll.types import Metrics, TrainBatch
from roll.workers.actor_train import merge

MakeBatch = Callable[[Sequence[int]], Awaitable[tuple[TrainBatch, Loss]]]
"""Numbers of rows to what there is to learn of them, and the loss to learn it by."""
EvaluateBatch = Callable[[TrainBatch, Loss], Awaitable[list[TrainResult]]]
"""What the loss says of a batch that is not learnt from, by rank."""
Report = Callable[[str, Metrics], Metrics]
"""Name of the held-out set and the loss's metrics on it, to the metrics of validation."""


@dataclass(frozen=True)
class GivenRows:
    """The rows of a run."""

    training: ExampleSet
    held_out: ExampleSet | None


def prepare_rows(config: OfflineConfig, kind: Kind, learn_all: bool = False) -> GivenRows:
    """Check the files of every role's model and prepare all rows.

    Raises:
        BadInput: model or data cannot be used.
    """
    for role in model_roles(config).values():
        check_readable(model_path(config, role.model_args))
    _, learning = learner(config)
    path = model_path(config, learning.model_args)
    tokenizer = load_tokenizer(path, learning.model_args.trust_remote_code)
    limits = Limits(config.prompt_length, config.response_length)

    def prepare(data_args: DataConfig, number: int) -> ExampleSet:
        part = Part(config.data_split, number, config.seed) if config.data_split else None
        rows = prepare_examples(data_args, tokenizer, limits, kind, learn_all, part)
        longer = f"the prompt is longer than prompt_length {limits.prompt} or a response than response_length {limits.response}"
        remark(rows.too_long, f"left out: {longer}")
        remark(rows.wordless, f"left out: {WORDLESS}")
        remark(rows.alike, "teach no preference: the chosen response is the rejected one")
        return rows

    training = prepare(learning.data_args, 0)
    if not config.eval_steps:
        return GivenRows(training, None)
    given = config.validation.data_args if config.validation else None
    return GivenRows(training, prepare(given or learning.data_args, 1))


def steps_of(config: OfflineConfig, rows: int, batch_size: int) -> int:
    """Steps of the run: `max_steps`, or fewer where the epochs end earlier."""
    _, learning = learner(config)
    return min(config.max_steps, -(-rows * learning.training_args.num_train_epochs // batch_size))


def parts(
    context: RunContext,
    meter: Meter,
    interrupt: Interrupt,
    update: Update,
    sampler: ExampleSampler,
    make_batch: MakeBatch,
    evaluate: Callable[[int], Awaitable[Metrics]],
    steps: int,
) -> Offline:
    """The parts of the loop."""
    batch_size = context.plan.batch.sequences_per_step

    async def take() -> tuple[TrainBatch, Loss]:
        return await make_batch(sampler.draw(batch_size))

    return Offline(
        take=take,
        train=meter.timed("train", update),
        evaluate=meter.timed("evaluate", evaluate),
        measure=meter.step,
        save=meter.timed("checkpoint", context.checkpointer.save_if_due),
        interrupted=interrupt.happened,
        tracker=context.tracker,
        max_steps=steps,
    )


def evaluation(
    config: OfflineConfig,
    rows: GivenRows,
    make_batch: MakeBatch,
    evaluate_batch: EvaluateBatch,
    report: Report,
    batch_size: int,
    steps: int,
) -> Callable[[int], Awaitable[Metrics]]:
    """Looks at every held-out row before the first step, every `eval_steps` and after the last; otherwise yields no metrics."""
    held_out, name = rows.held_out, config.validation.name if config.validation else "validation"

    async def evaluate(step: int) -> Metrics:
        if held_out is None or (step % config.eval_steps and step != steps):
            return {}
        results: list[TrainResult] = []
        for chunk in np.array_split(np.arange(len(held_out)), -(-len(held_out) // batch_size)):
            results += await evaluate_batch(*await make_batch(chunk.tolist()))
        return report(name, merge(results))

    return evaluate
