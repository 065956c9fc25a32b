"""How far does the response agree with the reference answer, character by character?"""

from __future__ import annotations

from collections.abc import Mapping
from os.path import commonprefix
from typing import Any

from roll.rewards.answers import ground_truth
from roll.rewards.base import REWARDS
from roll.types import Prompt, RewardResult, TurnReward


@REWARDS.register("right_prefix")
def right_prefix(prompt: Prompt, response: str, row: Mapping[str, Any]) -> RewardResult:
    """Return 1 for the reference answer, otherwise the share of the reference that the response begins with, less 1.

    Each character is a turn. A right one earns its share, the first wrong one -1, and what follows it nothing. A response that
    ends too early pays with its last character.

    Raises:
        ValueError: the row has no reference answer, or an empty one.
    """
    reference = ground_truth(row)
    if not reference:
        raise ValueError("the reference answer is empty")
    right = len(commonprefix([reference, response]))
    earned = [1 / len(reference)] * right
    if right < len(response):
        earned.append(-1.0)
    elif right < len(reference) and earned:
        earned[-1] -= 1.0
    is_right = response == reference
    value = right / len(reference) - (not is_right)
    return RewardResult(value, parts={"right": float(is_right)}, turns=tuple(TurnReward(end, part) for end, part in enumerate(earned, 1)))
