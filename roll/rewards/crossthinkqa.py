"""A reward for multiple choice: the right letter, in a box. Short and repetitive responses are penalised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from roll.algorithms.methods.base import declares
from roll.rewards.answers import final_text, ground_truth, last_boxed
from roll.rewards.base import REWARDS, RewardTraits
from roll.rewards.penalties import repetition, shortness
from roll.types import Prompt, RewardResult

CAPITAL = re.compile(r"[A-Z]")
LED_IN = "answer is"
VALUES = {
    "loose": {(True, True): 1.0, (True, False): 1.0, (False, True): -1.0, (False, False): -1.0},
    "strict": {(True, True): 1.0, (True, False): -1.0, (False, True): -1.0, (False, False): -1.0},
    "soft": {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0},
}
"""Reward by `reward_type` and (whether the choice is right, whether it is boxed)."""


def right_letter(row: Mapping[str, Any]) -> str:
    """Return the letter of the right choice. Raises ValueError if the row has no reference answer, or one without a capital letter."""
    letter = CAPITAL.search(ground_truth(row))
    if letter is None:
        raise ValueError("the row's reference answer ('ground_truth' or 'answer') has no capital letter that names a choice")
    return letter[0]


@REWARDS.register("crossthinkqa")
@declares(RewardTraits(check_row=right_letter))
def crossthinkqa(
    prompt: Prompt,
    response: str,
    row: Mapping[str, Any],
    *,
    reward_type: Literal["loose", "strict", "soft"] = "soft",
    response_length_penalty_coef: float = 0.0,
) -> RewardResult:
    """Return the sum of the reward for the choice, the penalty for repetition and the weighted penalty for a short response.

    The choice is the first capital letter in the last `\\boxed{...}`. If there is no box, it is the first capital letter after the last
    "answer is", or, without these words, of the whole text, as in ROLL. A response without a choice is wrong. Only the text after the
    last `</think>` is searched for the choice, but the penalties apply to the whole response. The score is 1 if the reward for the choice
    is above 0, and else 0.

    Args:
        reward_type: see VALUES. `loose` ignores the box, `strict` requires it, and `soft` gives partial credit.
        response_length_penalty_coef: weight of the penalty for a short response.

    Raises:
        ValueError: the reference answer has no capital letter, or `reward_type` is unknown.
    """
    if reward_type not in VALUES:
        raise ValueError(f"reward_type is '{reward_type}'; it must be one of {', '.join(VALUES)}")
    reference = right_letter(row)
    text = final_text(response)
    boxed = last_boxed(text)
    at = text.lower().rfind(LED_IN)
    answer = boxed if boxed is not None else text[at + len(LED_IN) :] if at >= 0 else text
    choice = CAPITAL.search(answer)
    right = choice is not None and choice[0] == reference
    parts = {
        "answer": VALUES[reward_type][right, boxed is not None],
        "repetition": repetition(response),
        "length": response_length_penalty_coef * shortness(len(response)),
    }
    note = f"answer {choice[0]}" if choice else "no choice in the response"
    return RewardResult(sum(parts.values()), parts=parts, note=note, score=float(parts["answer"] > 0))
