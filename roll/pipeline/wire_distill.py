"""Distillation: from the configuration to the parts of its loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from roll.algorithms.divergence import Distillation, Divergence
from roll.algorithms.losses import Loss
from roll.config.schema.offline import DistillConfig
from roll.data.example_batch import given_batch
from roll.data.examples import ExampleSet
from roll.data.sampler import ExampleSampler
from roll.models.student import student_loader
from roll.pipeline import offline
from roll.pipeline.device_phases import DevicePhases
from roll.pipeline.interrupt import Interrupt
from roll.pipeline.meter import meter_of
from roll.pipeline.position import Position
from roll.pipeline.roles import Roles, check_same_tokens, make_student, model_path
from roll.pipeline.run_context import Prepared, RunContext
from roll.pipeline.wire_offline import GivenRows, evaluation, parts, prepare_rows, steps_of
from roll.types import Floats, Metrics, Sequences, TrainBatch

Ask = Callable[[Sequences], Awaitable[Floats]]
"""Sequences to the teacher's states, [S, H] for S response tokens."""


def prepare(config: DistillConfig) -> Prepared:
    """Check the models' files, compare their vocabularies and prepare all examples; the loop, ready to be given its surroundings.

    Raises:
        BadInput: models or data cannot be used.
    """
    check_same_tokens(config, config.student.model_args, config.teacher.model_args, "teacher")
    measure = Divergence(config.divergence, config.jsd_beta, config.distill_temperature)
    teacher_args = config.teacher.model_args
    load = student_loader(model_path(config, teacher_args), teacher_args, measure)
    rows = prepare_rows(config, "responses")
    return Prepared(partial(_loop, config, rows, partial(make_student, load)), rows.training.identity, len(rows.training))


async def _loop(
    config: DistillConfig, rows: GivenRows, factory: Callable, roles: Roles, context: RunContext, interrupt: Interrupt
) -> Position:
    batch_size = context.plan.batch.sequences_per_step
    steps = steps_of(config, len(rows.training), batch_size)
    student = roles.actor_train("student", config.student, steps, temperature=1.0, factory=factory)
    teacher = roles.teacher(config.teacher)
    sharing = await roles.start()
    meter = meter_of(roles, context.plan, sharing)
    phases = DevicePhases(meter.timed("onload", sharing.bring))
    ask = phases.reference("teacher", teacher.states)

    sampler = ExampleSampler(len(rows.training), config.seed)
    position = await context.checkpointer.restore(phases.trainer(student, "student"), sampler, last_step=steps)
    loss = Distillation(config.distill_loss_weight)
    training = TeacherData(rows.training, meter.timed("teacher", ask), loss)
    # Evaluation is timed as a whole, with what it asks.
    held_out = TeacherData(rows.held_out, ask, loss) if rows.held_out else training
    evaluate_batch, update = phases.training(student.evaluate, "student"), phases.training(student.train_step, "student")
    evaluate = evaluation(config, rows, held_out, evaluate_batch, held_out_metrics, batch_size, steps)
    return await offline.train(parts(context, meter, interrupt, update, sampler, training, evaluate, steps), position)


@dataclass(frozen=True)
class TeacherData:
    """Rows, and the teacher that is asked about them."""

    rows: ExampleSet
    ask: Ask
    loss: Distillation

    async def __call__(self, numbers: Sequence[int]) -> tuple[TrainBatch, Loss]:
        """See `MakeBatch`."""
        batch = given_batch([self.rows.example(number) for number in numbers])
        return replace(batch, teacher_states=await self.ask(batch.sequences)), self.loss


def held_out_metrics(name: str, metrics: Metrics) -> Metrics:
    """What is lowered, and the divergence alone."""
    return {f"val/{name}/loss": metrics["distill/loss"], f"val/{name}/divergence": metrics["distill/divergence"]}
