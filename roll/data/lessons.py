"""Lessons laid end to end, as the losses of the offline pipelines read them. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.data.examples import Lesson
from roll.data.packing import concatenate
from roll.types import Sequences, TrainBatch


def given_batch(lessons: Sequence[Lesson]) -> TrainBatch:
    """A batch of given responses; pairs stay together. There are no advantages, which is 0, and no behaviour policy."""
    unit = len(lessons[0].examples)
    examples = [example for lesson in lessons for example in lesson.examples]
    sequences = concatenate([example.token_ids for example in examples], [example.response_mask for example in examples])
    labels = np.repeat(np.array([lesson.value for lesson in lessons], np.float32), unit)
    nothing = np.zeros(len(sequences.token_ids), np.float32)
    return TrainBatch(sequences, nothing, None, np.full(len(nothing), -1, np.int32), labels=labels, unit=unit)


def mismatched(lessons: Sequence[Lesson]) -> Sequences:
    """Each prompt with the response to the next one; to the first where there is no next."""
    examples = [lesson.examples[0] for lesson in lessons]
    others = [*examples[1:], examples[0]]
    prompts = [example.token_ids[~example.response_mask] for example in examples]
    responses = [example.token_ids[example.response_mask] for example in others]
    token_ids = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
    masks = [np.arange(len(ids)) >= len(prompt) for ids, prompt in zip(token_ids, prompts, strict=True)]
    return concatenate(token_ids, masks)
