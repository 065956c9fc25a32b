"""The offline loop, which learns from rows of data and generates nothing: SFT, preferences, reward models and
distillation.

rows ──▶ take (adds outputs of a reference or teacher) ──▶ train ──▶ evaluate ──▶ log ──▶ save
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from roll.data.examples import ExampleSampler
from roll.runs.checkpointer import Checkpointer
from roll.runs.device_phases import DevicePhases
from roll.runs.interrupt import Interrupt
from roll.runs.meter import Meter
from roll.runs.offline.batches import Batches
from roll.runs.position import Epochs, Position
from roll.tracking.base import Tracker
from roll.training.actor_train import ActorTrain
from roll.types import Metrics


class Validation(Protocol):
    """Held-out rows."""

    async def after(self, step: int) -> Metrics:
        """Return the metrics after a step, empty if validation is not due. Onloads the learner."""
        ...


@dataclass(frozen=True)
class Offline:
    """The parts of a run."""

    phases: DevicePhases
    meter: Meter
    role: str
    """The role that learns."""
    trainer: ActorTrain
    training: Batches
    """Training batches. Onloads any other model that has to process the rows."""
    sampler: ExampleSampler
    batch_size: int
    validation: Validation | None
    checkpointer: Checkpointer
    interrupt: Interrupt
    tracker: Tracker
    epochs: Epochs
    max_steps: int


async def train_offline(run: Offline, position: Position) -> Position:
    """Run the loop from `position` to the last step, or to the end of the step in which the run is interrupted or
    `early_stopping` ends it.
    """
    metrics = await run.validation.after(0) if run.validation and position.step == 0 else {}
    before = await run.meter.step(0, 0)  # keeps the time spent so far out of the next step
    if metrics:
        run.tracker.log(0, metrics | before)
        run.checkpointer.observe(0, metrics)
    while position.step < run.max_steps and not (run.checkpointer.stopped_early or run.interrupt.happened()):
        batch, loss = await run.training.of(run.sampler.draw(run.batch_size))
        await run.phases.training(run.role)
        with run.meter.part("train"):
            metrics = await run.trainer.train_step(batch, loss, position.policy_version)
        position = Position(position.step + 1, position.policy_version + 1)
        if run.validation:
            metrics |= await run.validation.after(position.step)
        metrics |= await run.meter.step(len(batch.sequences.token_ids), batch.example_count) | {
            "epoch": run.epochs.passed(position.step)
        }
        run.tracker.log(position.step, metrics)
        run.checkpointer.observe(position.step, metrics)
        with run.meter.part("checkpoint"):
            await run.checkpointer.save_if_due(position)
    return position
