"""A reward for multiple choice: the letter of the right choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.algorithms.methods import declares
from roll.rewards.answers import final_text, ground_truth, last_boxed
from roll.rewards.base import REWARDS, RewardTraits
from roll.rewards.choices import letter_of, stated_letter
from roll.types import Prompt, RewardOutcome, RewardResult


def right_letter(row: Mapping[str, Any]) -> str:
    """Return the letter of the right choice. Raises ValueError if the reference answer is no capital letter."""
    reference = ground_truth(row)
    letter = letter_of(reference)
    if letter is None or letter not in reference:
        raise ValueError(f"the reference answer {reference[:80]!r} is not a capital letter")
    return letter


@REWARDS.register("multiple_choice")
@declares(RewardTraits(check_row=right_letter))
def multiple_choice(prompt: Prompt, response: str, row: Mapping[str, Any]) -> RewardResult:
    """Return 1 for the right letter, 0 for another letter, and UNPARSABLE for a response without a choice.

    The choice is read from the last `\\boxed{...}`, else from what the text states; see `stated_letter`. A letter
    within a word is no choice, nor are several letters together, as in "A or B". The reference is the row's
    `ground_truth`, else its `answer`.

    Raises:
        ValueError: the row has no reference answer, or one that is not a capital letter.
    """
    reference = right_letter(row)
    text = final_text(response)
    boxed = last_boxed(text)
    letter = stated_letter(text) if boxed is None else letter_of(boxed)
    if letter is None:
        return RewardResult(0.0, RewardOutcome.UNPARSABLE, note="no choice in the response")
    return RewardResult(float(letter == reference), note=f"answer {letter}")
