"""The offline loop, which learns from rows of data and generates nothing: SFT, preferences, reward models and distillation.

rows ──▶ take (adds outputs of a reference or teacher) ──▶ train ──▶ evaluate ──▶ log ──▶ save
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from roll.algorithms.losses import Loss
from roll.runs.device_phases import DevicePhases
from roll.runs.epochs import Epochs
from roll.runs.position import Position
from roll.tracking.base import Tracker
from roll.types import Metrics, TrainBatch


@dataclass(frozen=True)
class Offline:
    """The wired parts of a run."""

    phases: DevicePhases
    role: str
    """The role that learns."""
    take: Callable[[], Awaitable[tuple[TrainBatch, Loss]]]
    """Returns the batch of the next update and its loss. Onloads any other model that has to process the rows."""
    train: Callable[[TrainBatch, Loss, int], Awaitable[Metrics]]
    evaluate: Callable[[int], Awaitable[Metrics]]
    """Returns validation metrics after a step, empty if validation is not due. Onloads the learner."""
    measure: Callable[[int, int], Awaitable[Metrics]]
    """Returns times, throughput and memory of a step, given its numbers of tokens and rows."""
    save: Callable[[Position], Awaitable[None]]
    """Writes a checkpoint if one is due."""
    interrupted: Callable[[], bool]
    tracker: Tracker
    epochs: Epochs
    max_steps: int


async def train(run: Offline, position: Position) -> Position:
    """Run the loop from `position` to the last step, or to the end of the step in which the run is interrupted."""
    metrics = await run.evaluate(0) if position.step == 0 else {}
    before = await run.measure(0, 0)  # keeps the time spent so far out of the next step
    if metrics:
        run.tracker.log(0, metrics | before)
    while position.step < run.max_steps and not run.interrupted():
        batch, loss = await run.take()
        await run.phases.training(run.role)
        metrics = await run.train(batch, loss, position.policy_version)
        position = Position(position.step + 1, position.policy_version + 1)
        metrics |= await run.evaluate(position.step)
        metrics |= await run.measure(len(batch.sequences.token_ids), batch.example_count) | {"epoch": run.epochs.passed(position.step)}
        run.tracker.log(position.step, metrics)
        await run.save(position)
    return position
