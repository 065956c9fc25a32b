"""Supervised fine-tuning: the loop. The same trainer as RLVR, with the likelihood of given responses as its loss."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from roll.algorithms.losses import Loss, NegativeLogLikelihood
from roll.data.examples import Example
from roll.data.packing import concatenate
from roll.pipeline.rlvr import Position
from roll.tracking.base import Tracker
from roll.types import Metrics, TrainBatch


@dataclass(frozen=True)
class Sft:
    """The wired parts of a run. `assemble` makes them."""

    draw: Callable[[], list[Example]]
    train: Callable[[TrainBatch, Loss, int], Awaitable[Metrics]]
    measure: Callable[[TrainBatch], Awaitable[Metrics]]
    save: Callable[[Position], Awaitable[None]]
    interrupted: Callable[[], bool]
    tracker: Tracker
    max_steps: int


async def train(run: Sft, position: Position) -> Position:
    """Run the loop from `position` to the last step, or to the end of the step in which the run is interrupted."""
    while position.step < run.max_steps and not run.interrupted():
        batch = supervised_batch(run.draw())
        metrics = await run.train(batch, NegativeLogLikelihood(), position.policy_version)
        position = Position(position.step + 1, position.policy_version + 1)
        run.tracker.log(position.step, metrics | await run.measure(batch))
        await run.save(position)
    return position


def supervised_batch(examples: list[Example]) -> TrainBatch:
    """Examples laid end to end. There are no advantages, which is 0, and no behaviour policy."""
    sequences = concatenate([example.token_ids for example in examples], [example.response_mask for example in examples])
    nothing = np.zeros(len(sequences.token_ids), np.float32)
    return TrainBatch(sequences, nothing, None, np.full(len(nothing), -1, np.int32))
