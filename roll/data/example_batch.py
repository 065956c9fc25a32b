"""Packs examples into the batches of the offline pipelines' losses. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.data.examples import Example
from roll.data.packing import concatenate
from roll.types import Sequences, TrainBatch


def given_batch(examples: Sequence[Example]) -> TrainBatch:
    """Return a batch of given responses. The two sequences of a pair are adjacent. Advantages are 0. There is no
    behaviour policy.
    """
    sequences_per_example = len(examples[0].sequences)
    parts = [part for example in examples for part in example.sequences]
    sequences = concatenate([part.token_ids for part in parts], [part.response_mask for part in parts])
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
    """Combine each prompt with the response to the next one, and the last prompt with the first response."""
    sequences = [example.sequences[0] for example in examples]
    others = [*sequences[1:], sequences[0]]
    prompts = [sequence.token_ids[~sequence.response_mask] for sequence in sequences]
    responses = [sequence.token_ids[sequence.response_mask] for sequence in others]
    token_ids = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
    masks = [np.arange(len(ids)) >= len(prompt) for ids, prompt in zip(token_ids, prompts, strict=True)]
    return concatenate(token_ids, masks)
