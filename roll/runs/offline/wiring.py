"""Wires the offline pipelines: their shared loop, and the parts that each pipeline adds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np

from roll.backend import TrainStepResult
from roll.backend_settings import ModelLoader
from roll.config.derived.batch import row_learner
from roll.config.derived.placement import model_roles
from roll.config.plan.plan import Plan
from roll.config.schema.model import DataConfig
from roll.config.schema.offline import OfflineConfig
from roll.data.ends import NO_END, EndOfTurn, ends_of
from roll.data.examples import WORDLESS, ExampleSet, Kind, LengthLimits, RowRange, prepare_examples
from roll.data.remarks import warn_of_rows
from roll.data.sampler import ExampleSampler
from roll.models.load import check_readable, load_policy, load_tokenizer
from roll.runs.device_phases import DevicePhases, untimed
from roll.runs.epochs import Epochs
from roll.runs.interrupt import Interrupt
from roll.runs.learning import OnloadedTrainer
from roll.runs.meter import meter_of
from roll.runs.offline import loop as offline
from roll.runs.offline.batches import Ask, Batches, MakeBatch, Models
from roll.runs.position import Position
from roll.runs.role_models import embedding_rows, model_path
from roll.runs.roles import Roles
from roll.runs.run_context import PreparedRun, RunContext
from roll.training.actor_train import ActorTrain, merge
from roll.types import Floats, Metrics, Sequences

Report = Callable[[str, Metrics], Metrics]
"""Turns the name of a held-out set and the loss's metrics on it into validation metrics."""


@dataclass(frozen=True)
class GivenRows:
    """The rows of a run."""

    training: ExampleSet
    held_out: ExampleSet | None
    end: EndOfTurn = NO_END
    """What ends a response."""


def prepare_rows(config: OfflineConfig, kind: Kind, learn_all: bool = False) -> GivenRows:
    """Check the model files of every role, and prepare all rows.

    Args:
        learn_all: whether to learn from the prompts as well.

    Raises:
        BadInput: a model or the data cannot be used.
    """
    for role in model_roles(config).values():
        check_readable(model_path(config, role.model_args))
    _, learning = row_learner(config)
    path = model_path(config, learning.model_args)
    tokenizer = load_tokenizer(path, learning.model_args.trust_remote_code)
    limits = LengthLimits(config.prompt_length, config.response_length)
    embedded = embedding_rows(config, tokenizer, model_roles(config).values())

    def prepare(data_args: DataConfig, number: int) -> ExampleSet:
        part = RowRange(config.data_split, number, config.seed) if config.data_split else None
        rows = prepare_examples(data_args, tokenizer, limits, kind, learn_all, part, embedded=embedded)
        longer = (
            f"the prompt is longer than prompt_length {limits.prompt} or a response than response_length "
            f"{limits.response}"
        )
        warn_of_rows(rows.too_long, f"were left out: {longer}")
        warn_of_rows(rows.wordless, f"were left out: {WORDLESS}")
        warn_of_rows(rows.alike, "teach no preference: the chosen and the rejected response are the same")
        for what, counts in rows.remarks.items():
            warn_of_rows(counts, what)
        return rows

    training, end = prepare(learning.data_args, 0), ends_of(learning.data_args, tokenizer)
    if not config.eval_steps:
        return GivenRows(training, None, end)
    given = config.validation.data_args if config.validation else None
    return GivenRows(training, prepare(given.rendered_as(learning.data_args) if given else learning.data_args, 1), end)


def steps_of(config: OfflineConfig, rows: int, batch_size: int) -> int:
    """Return the number of steps of the run: those of its epochs, or `max_steps` if that is less."""
    _, learning = row_learner(config)
    return Epochs(rows, batch_size).steps(learning.training_args.num_train_epochs, config.max_steps)


@dataclass(frozen=True)
class OtherModel:
    """The reference or the teacher."""

    role: str
    """The role that computes the outputs. This is the learner's role if the reference is the learner with its adapter
    off.
    """
    part: str
    """Name in the metric `time/<part>`."""
    ask: Ask
    beforehand: bool = False
    """Whether the model processes all rows before the first step. A separate role ends afterwards."""


def no_other_model(plan: Plan, roles: Roles, learner: ActorTrain) -> OtherModel | None:
    """Return None. For pipelines in which the learner is the only model."""


@dataclass(frozen=True)
class OfflinePipeline:
    """The parts that a pipeline adds to the shared loop."""

    rows: GivenRows
    make_batch: MakeBatch
    report: Report
    load: ModelLoader = load_policy
    """Loads the learner's model."""
    other_model: Callable[[Plan, Roles, ActorTrain], OtherModel | None] = no_other_model
    """Requests and returns the reference or the teacher, if the pipeline has one."""

    def prepared(self, config: OfflineConfig) -> PreparedRun:
        """Return the loop, ready to run."""
        return PreparedRun(partial(_loop, config, self), self.rows.training.identity, len(self.rows.training))


@dataclass(frozen=True)
class StartedRoles:
    """The started roles of a run, and their phases on the devices."""

    phases: DevicePhases
    role: str
    """The role that learns."""
    trainer: ActorTrain
    other: OtherModel | None
    part: Callable[[str], AbstractContextManager[None]] = untimed
    """Times the calls of the models; see `Meter.part`."""

    @property
    def models(self) -> Models:
        """Return the models that a batch may need."""
        return Models(self.log_probs, self.ask if self.other else None)

    async def log_probs(self, sequences: Sequences) -> Floats:
        """Return the log-probs of the learner with its current weights."""
        with self.part("log_probs"):
            await self.phases.scoring(self.role)
            return await self.trainer.log_probs(sequences)

    async def ask(self, sequences: Sequences) -> Floats:
        """Return the output of the other model."""
        assert self.other is not None
        with self.part(self.other.part):
            await self.phases.scoring(self.other.role)
            return await self.other.ask(sequences)


@dataclass(frozen=True)
class OfflineValidation:
    """Evaluates the learner on held-out rows every `every` steps and after the last step. Implements `Validation`."""

    rows: Batches
    chunk: int
    """Largest number of rows of one evaluation call."""
    every: int
    last_step: int
    name: str
    report: Report
    started: StartedRoles
    part: Callable[[str], AbstractContextManager[None]]
    """Times the whole as `evaluate`; see `Meter.part`."""

    async def after(self, step: int) -> Metrics:
        """See `Validation`."""
        if step % self.every and step != self.last_step:
            return {}
        with self.part("evaluate"):
            return self.report(self.name, await self._metrics())

    async def _metrics(self) -> Metrics:
        """Return the loss's metrics on all held-out rows."""
        results: list[TrainStepResult] = []
        count = len(self.rows.rows)
        for numbers in np.array_split(np.arange(count), -(-count // self.chunk)):
            batch, loss = await self.rows.of(numbers.tolist())
            await self.started.phases.training(self.started.role)
            results += await self.started.trainer.evaluate(batch, loss)
        return merge(results)


async def _loop(
    config: OfflineConfig, pipeline: OfflinePipeline, roles: Roles, context: RunContext, interrupt: Interrupt
) -> Position:
    rows, batch_size = pipeline.rows, context.plan.batch.sequences_per_step
    steps = steps_of(config, len(rows.training), batch_size)
    role, keys = row_learner(config)
    trainer = roles.actor_train(role, keys, steps, temperature=1.0, load=pipeline.load, ends=rows.end.token_ids)
    other = pipeline.other_model(context.plan, roles, trainer)
    sharing = await roles.start()
    meter = meter_of(roles, context, sharing)
    phases = DevicePhases(sharing, meter.part)
    timed = StartedRoles(phases, role, trainer, other, meter.part)
    within = StartedRoles(phases, role, trainer, other)  # evaluation is timed as a whole

    sampler = ExampleSampler(len(rows.training), config.seed)
    epochs = Epochs(len(rows.training), batch_size)
    position = await context.checkpointer.restore(
        OnloadedTrainer(phases, role, trainer), sampler, last_step=steps, epochs=epochs
    )
    training = Batches(rows.training, pipeline.make_batch, timed.models)
    held_out = Batches(rows.held_out, pipeline.make_batch, within.models) if rows.held_out else None
    if other and other.beforehand:
        training = await training.record(sampler.ahead((steps - position.step) * batch_size), batch_size, timed.ask)
        held_out = held_out and await held_out.record(range(len(held_out.rows)), batch_size, timed.ask)
        if other.role != role:
            await roles.end(other.role)
    name = config.validation.name if config.validation else "validation"
    run = offline.Offline(
        phases=phases,
        meter=meter,
        role=role,
        trainer=trainer,
        training=training,
        sampler=sampler,
        batch_size=batch_size,
        validation=OfflineValidation(
            held_out, batch_size, config.eval_steps, steps, name, pipeline.report, within, meter.part
        )
        if held_out
        else None,
        checkpointer=context.checkpointer,
        interrupt=interrupt,
        tracker=context.tracker,
        epochs=epochs,
        max_steps=steps,
    )
    return await offline.train_offline(run, position)
