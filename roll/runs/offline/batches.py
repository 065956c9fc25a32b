"""Turns rows into training batches, including the outputs of a reference or teacher model.

Packs examples into the batches of the offline pipelines' losses. Pure functions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from roll.algorithms.losses import Loss
from roll.data.examples import Example, ExampleSet
from roll.data.packing import concatenate
from roll.types import Floats, Sequences, TrainBatch


def given_batch(examples: Sequence[Example]) -> TrainBatch:
    """Return a batch of given responses, the two of a pair adjacent. Advantages are 0; no behaviour policy."""
    sequences_per_example = len(examples[0].sequences)
    parts = [part for example in examples for part in example.sequences]
    masks, shown = [part.response_mask for part in parts], [part.shown for part in parts]
    sequences = concatenate([part.token_ids for part in parts], masks, shown)
    labels = np.repeat(np.array([example.value for example in examples], np.float32), sequences_per_example)
    nothing = np.zeros(len(sequences.token_ids), np.float32)
    return TrainBatch(
        sequences,
        nothing,
        None,
        np.full(len(nothing), -1, np.int32),
        labels=labels,
        sequences_per_example=sequences_per_example,
    )


def mismatched(examples: Sequence[Example]) -> Sequences:
    """Combine each prompt and its pictures with the response to the next one, and the last prompt with the first
    response.
    """
    sequences = [example.sequences[0] for example in examples]
    others = [*sequences[1:], sequences[0]]
    prompts = [sequence.token_ids[~sequence.response_mask] for sequence in sequences]
    responses = [sequence.token_ids[sequence.response_mask] for sequence in others]
    token_ids = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
    masks = [np.arange(len(ids)) >= len(prompt) for ids, prompt in zip(token_ids, prompts, strict=True)]
    return concatenate(token_ids, masks, [sequence.shown for sequence in sequences])


Ask = Callable[[Sequences], Awaitable[Floats]]
"""Computes a model's output for sequences: log-probs [T] of response tokens (0 elsewhere), or states [S, H]."""


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
        """Compute the output of `ask` once for each distinct row, `chunk` at a time. Return a copy that uses them."""
        once, recorded = sorted(set(numbers)), {}
        for start in range(0, len(once), chunk):
            asked = once[start : start + chunk]
            batch = given_batch([self.rows.example(number) for number in asked])
            log_probs = await ask(batch.sequences)
            ends = batch.sequences.offsets[batch.sequences_per_example :: batch.sequences_per_example][:-1]
            recorded |= dict(zip(asked, np.split(log_probs, ends), strict=True))
        return replace(self, recorded=recorded)
