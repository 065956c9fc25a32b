"""Turns rows into training batches, including the outputs of a reference or teacher model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from roll.algorithms.losses import Loss
from roll.data.example_batch import given_batch
from roll.data.examples import Example, ExampleSet
from roll.types import Floats, Sequences, TrainBatch

Ask = Callable[[Sequences], Awaitable[Floats]]
"""Computes the output of a model for sequences: log-probs [T] of the response tokens (0 elsewhere), or a teacher's
states [S, H].
"""


@dataclass(frozen=True)
class Models:
    """Models whose outputs a batch may need before it is trained on."""

    log_probs: Ask
    """The learner with its current weights."""
    other: Ask | None = None
    """The reference or the teacher; None for a pipeline without one."""


MakeBatch = Callable[[Sequence[Example], Models], Awaitable[tuple[TrainBatch, Loss]]]
"""Builds the training batch of some rows, and returns it with its loss."""


@dataclass(frozen=True)
class Batches:
    """Builds training batches from the rows of a data set."""

    rows: ExampleSet
    make_batch: MakeBatch
    models: Models
    recorded: Mapping[int, Floats] = field(default_factory=dict)
    """By row number, log-probs of the row's tokens under the other model, if they were computed beforehand."""

    async def of(self, numbers: Sequence[int]) -> tuple[TrainBatch, Loss]:
        """Return the batch of these rows and its loss."""
        examples = [self.rows.example(number) for number in numbers]
        if not self.recorded:
            return await self.make_batch(examples, self.models)

        async def recall(sequences: Sequences) -> Floats:
            log_probs = np.concatenate([self.recorded[number] for number in numbers])
            assert len(log_probs) == len(sequences.token_ids), "no log-probs were recorded for these sequences"
            return log_probs

        return await self.make_batch(examples, replace(self.models, other=recall))

    async def record(self, numbers: Sequence[int], chunk: int, ask: Ask) -> Batches:
        """Compute the output of `ask` once for each distinct row, `chunk` rows per call. Return a copy that uses the
        recorded results.
        """
        once, recorded = sorted(set(numbers)), {}
        for start in range(0, len(once), chunk):
            asked = once[start : start + chunk]
            batch = given_batch([self.rows.example(number) for number in asked])
            log_probs = await ask(batch.sequences)
            ends = batch.sequences.offsets[batch.sequences_per_example :: batch.sequences_per_example][:-1]
            recorded |= dict(zip(asked, np.split(log_probs, ends), strict=True))
        return replace(self, recorded=recorded)
