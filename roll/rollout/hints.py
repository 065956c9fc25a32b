"""What a self-teacher sees of a step: the hints of each response, and the teacher's sequences, which end with the exact
tokens of the responses. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from roll.config.schema.self_distillation import Hint
from roll.data import packing
from roll.data.teacher_prompts import Hints
from roll.rollout.filters import usable
from roll.types import Bools, Episode, Ints, Prompt, RolloutGroup, Sequences

Passed = Callable[[Prompt, Episode], bool]
"""Whether a response to a prompt passed."""


def step_hints(
    groups: Sequence[RolloutGroup], sees: Sequence[Hint], passed: Passed, solution: Callable[[Prompt], str | None]
) -> list[tuple[Prompt, Hints]]:
    """Return the prompt and the hints of each response of a step that has a verdict, in the order of `experience`."""
    found = list[tuple[Prompt, Hints]]()
    for group in groups:
        episodes, prompt = usable(group), group.prompt
        known = solution(prompt) if "solution" in sees else None
        found += [(prompt, hints) for hints in _group_hints(episodes, prompt, sees, passed, known)]
    return found


def _group_hints(
    episodes: Sequence[Episode], prompt: Prompt, sees: Sequence[Hint], passed: Passed, solution: str | None
) -> list[Hints]:
    right = [passed(prompt, episode) for episode in episodes]
    texts = [episode.text for episode in episodes]
    # Two suffice: a response never sees itself, which would raise the probability of its own tokens whatever they are.
    shown = [number for number, is_right in enumerate(right) if is_right and texts[number].strip()][:2]
    found = list[Hints]()
    for number, episode in enumerate(episodes):
        hints: dict[Hint, str] = {"solution": solution} if solution else {}
        if "feedback" in sees and not right[number] and (note := episode.reward.note.strip()):
            hints["feedback"] = note
        if "success" in sees and (others := [one for one in shown if one != number]):
            hints["success"] = texts[others[0]]
        found.append(hints)
    return found


@dataclass(frozen=True)
class TaughtSequences:
    """Some sequences of a step, each as the policy and as the teacher reads it."""

    rows: Sequence[int]
    """Their indices in the step."""
    student: Sequences
    """The sequences of the step."""
    teacher: Sequences
    """The teacher's prompt, and the tokens of the response."""


def taught_sequences(sequences: Sequences, prompts: dict[int, Ints]) -> TaughtSequences:
    """Return the sequences that are taught, in the order of the step.

    Args:
        sequences: the step's, each a prompt and a response.
        prompts: the tokens of the teacher's prompts, by the index of the sequence. At least one. All of these sequences
            have tokens in the loss.
    """
    rows = sorted(prompts)
    student = packing.select(sequences, rows)
    token_ids, masks = list[Ints](), list[Bools]()
    for row in rows:
        own = slice(sequences.offsets[row], sequences.offsets[row + 1])
        mask = sequences.response_mask[own]
        first = int(mask.argmax())
        assert first and mask[first:].all(), "a taught sequence is a prompt and a response that is in the loss"
        token_ids.append(np.concatenate([prompts[row], sequences.token_ids[own][first:]]))
        masks.append(np.concatenate([np.zeros(len(prompts[row]), np.bool_), mask[first:]]))
    return TaughtSequences(rows, student, packing.concatenate(token_ids, masks))


def taught_tokens(sequences: Sequences, rows: Sequence[int]) -> Bools:
    """Return which tokens of a step are in the loss and belong to the sequences `rows`, [T]."""
    chosen = np.zeros(len(sequences), np.bool_)
    chosen[list(rows)] = True
    return np.repeat(chosen, sequences.lengths) & sequences.response_mask
