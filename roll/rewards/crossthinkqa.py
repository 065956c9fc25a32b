"""Did the response choose the right letter, and in a box? Short and repetitive responses are penalised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from roll.rewards.answers import final_text, ground_truth, last_boxed
from roll.rewards.base import REWARDS
from roll.rewards.penalties import repetition, shortness
from roll.types import Prompt, RewardResult

CAPITAL = re.compile(r"[A-Z]")
LED_IN = "answer is"
VALUES = {
    "loose": {(True, True): 1.0, (True, False): 1.0, (False, True): -1.0, (False, False): -1.0},
    "strict": {(True, True): 1.0, (True, False): -1.0, (False, True): -1.0, (False, False): -1.0},
    "soft": {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0},
}
"""Values by reward type, and by whether the choice is right and boxed."""


@REWARDS.register("crossthinkqa")
def crossthinkqa(
    prompt: Prompt,
    response: str,
    row: Mapping[str, Any],
    *,
    reward_type: Literal["loose", "strict", "soft"] = "soft",
    response_length_penalty_coef: float = 0.0,
) -> RewardResult:
    """Return the choice's value by `reward_type`, plus the penalty for repetition, plus the coefficient times that for a short response.

    The choice is the first capital letter of the last `\\boxed{...}`, else of what follows the last "answer is"; without one the response
    is wrong. It is read from what follows the last `</think>`; penalties are of the whole response.

    Raises:
        ValueError: the row's `ground_truth` has no letter, or the reward type is unknown.
    """
    if reward_type not in VALUES:
        raise ValueError(f"reward_type is '{reward_type}', and not one of {', '.join(VALUES)}")
    reference = CAPITAL.search(ground_truth(row))
    if reference is None:
        raise ValueError("the row's 'ground_truth' has no letter of a choice")
    text = final_text(response)
    boxed = last_boxed(text)
    at = text.lower().rfind(LED_IN)
    answer = boxed if boxed is not None else text[at + len(LED_IN) :] if at >= 0 else ""
    choice = CAPITAL.search(answer)
    right = choice is not None and choice[0] == reference[0]
    parts = {
        "answer": VALUES[reward_type][right, boxed is not None],
        "repetition": repetition(response),
        "length": response_length_penalty_coef * shortness(len(response)),
    }
    return RewardResult(sum(parts.values()), parts=parts, note=f"answer {choice[0]}" if choice else "no choice in the response")
