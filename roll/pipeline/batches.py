"""Turns rows into batches, with the outputs of a reference or teacher for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from roll.algorithms.losses import Loss
from roll.data.example_batch import given_batch
from roll.data.examples import Example, ExampleSet
from roll.types import Floats, Sequences, TrainBatch

Ask = Callable[[Sequences], Awaitable[Floats]]
"""Computes the output of a model for sequences: log-probs of the response tokens [T], or a teacher's states [S, H]."""


@dataclass(frozen=True)
class Models:
    """The models that may process a batch before the learner does."""

    log_probs: Ask
    """The learner as it is."""
    other: Ask | None = None
    """The reference or the teacher; None for a pipeline without one."""


MakeBatch = Callable[[Sequence[Example], Models], Awaitable[tuple[TrainBatch, Loss]]]
"""Makes the batch of rows, and returns it with its loss."""


@dataclass(frozen=True)
class Batches:
    """Makes batches from rows."""

    rows: ExampleSet
    make_batch: MakeBatch
    models: Models
    recorded: Mapping[int, Floats] = field(default_factory=dict)
    """Log-probs of all tokens of a row under the other model, by row number, if they were computed beforehand."""

    async def of(self, numbers: Sequence[int]) -> tuple[TrainBatch, Loss]:
        """Return the batch of these rows and its loss."""
        examples = [self.rows.example(number) for number in numbers]
        if not self.recorded:
            return await self.make_batch(examples, self.models)

        async def recall(sequences: Sequences) -> Floats:
            log_probs = np.concatenate([self.recorded[number] for number in numbers])
            assert len(log_probs) == len(sequences.token_ids), "asked about sequences that were not recorded"
            return log_probs

        return await self.make_batch(examples, replace(self.models, other=recall))

    async def record(self, numbers: Sequence[int], chunk: int, ask: Ask) -> Batches:
        """Return a copy for which `ask` was called beforehand, once for each row, `chunk` rows at a time."""
        once, recorded = sorted(set(numbers)), {}
        for start in range(0, len(once), chunk):
            asked = once[start : start + chunk]
            batch = given_batch([self.rows.example(number) for number in asked])
            log_probs = await ask(batch.sequences)
            ends = batch.sequences.offsets[batch.sequences_per_example :: batch.sequences_per_example][:-1]
            recorded |= dict(zip(asked, np.split(log_probs, ends), strict=True))
        return replace(self, recorded=recorded)
