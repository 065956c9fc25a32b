"""A reward for multiple choice: the right letter, in a box. Short and repetitive responses are penalised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from roll.algorithms.methods import declares
from roll.rewards.answers import final_text, ground_truth, last_boxed
from roll.rewards.base import REWARDS, RewardTraits
from roll.rewards.choices import letter_of, stated_letter
from roll.rewards.functions.penalties import repetition, shortness
from roll.types import Prompt, RewardResult

CAPITAL = re.compile(r"[A-Z]")
LED_IN = "answer is"
VALUES = {
    "loose": {(True, True): 1.0, (True, False): 1.0, (False, True): -1.0, (False, False): -1.0},
    "strict": {(True, True): 1.0, (True, False): -1.0, (False, True): -1.0, (False, False): -1.0},
    "soft": {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0},
}
"""Reward by `reward_type` and (whether the choice is right, whether it is boxed)."""
RIGHT = 0.5
"""Smallest reward in VALUES of a right choice that the `reward_type` accepts."""


def crossthink_letter(row: Mapping[str, Any]) -> str:
    """Return the letter of the right choice. Raises ValueError without a reference answer with a capital letter."""
    letter = CAPITAL.search(ground_truth(row))
    if letter is None:
        raise ValueError(
            "the row's reference answer ('ground_truth' or 'answer') has no capital letter that names a choice"
        )
    return letter[0]


def chosen_letter(text: str, boxed: str | None) -> str | None:
    """Return the letter of the last box, or else the letter that the text states."""
    return stated_letter(text) if boxed is None else letter_of(boxed)


def first_capital(text: str, boxed: str | None) -> str | None:
    """Return the letter that ROLL takes for the choice."""
    at = text.lower().rfind(LED_IN)
    letter = CAPITAL.search(boxed if boxed is not None else text[at + len(LED_IN) :] if at >= 0 else text)
    return letter[0] if letter else None


CHOICES = {"letter": chosen_letter, "first_capital": first_capital}
"""How the choice is found, by `choice`, in the text after the thinking and the content of its last box."""


@REWARDS.register("crossthinkqa")
@declares(RewardTraits(check_row=crossthink_letter, passes_at=RIGHT, passes_by="answer"))
def crossthinkqa(
    prompt: Prompt,
    response: str,
    row: Mapping[str, Any],
    *,
    reward_type: Literal["loose", "strict", "soft"] = "soft",
    choice: Literal["letter", "first_capital"] = "letter",
    response_length_penalty_coef: float = 0.0,
) -> RewardResult:
    """Return the sum of the reward for the choice, the penalty for repetition and the weighted penalty for a short
    response.

    The choice is the letter in the last `\\boxed{...}`. If there is no box, it is the letter that the text states; see
    `choices.stated_letter`. A response without a choice is wrong. Only the text after the thinking is searched for the
    choice, but the penalties apply to the whole response. The score is 1 if the reward for the choice is above 0, and
    else 0.

    Args:
        reward_type: see VALUES. `loose` ignores the box, `strict` requires it, and `soft` gives partial credit.
        choice: `first_capital` takes, as ROLL does, the first capital letter in the last box, or without a box in the
            text after the last "answer is", or without these words in the whole text, even if it begins a word.
        response_length_penalty_coef: weight of the penalty for a short response.

    Raises:
        ValueError: the reference answer has no capital letter, or `reward_type` or `choice` is unknown.
    """
    if reward_type not in VALUES:
        raise ValueError(f"reward_type is '{reward_type}'; it must be one of {', '.join(VALUES)}")
    if choice not in CHOICES:
        raise ValueError(f"choice is '{choice}'; it must be one of {', '.join(CHOICES)}")
    reference = crossthink_letter(row)
    text = final_text(response)
    boxed = last_boxed(text)
    letter = CHOICES[choice](text, boxed)
    right = letter == reference
    parts = {
        "answer": VALUES[reward_type][right, boxed is not None],
        "repetition": repetition(response),
        "length": response_length_penalty_coef * shortness(len(response)),
    }
    note = f"answer {letter}" if letter else "no choice in the response"
    return RewardResult(sum(parts.values()), parts=parts, note=note, score=float(parts["answer"] > 0))
