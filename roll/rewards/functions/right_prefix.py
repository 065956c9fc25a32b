"""A reward for the length of the prefix that a response shares with the reference answer."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import commonprefix
from typing import Any

from roll.algorithms.methods import declares
from roll.rewards.answers import ground_truth
from roll.rewards.base import REWARDS, RewardTraits
from roll.types import Prompt, RewardResult, TurnReward


@REWARDS.register("right_prefix")
@declares(RewardTraits(check_row=ground_truth, passes_by="right"))
def right_prefix(prompt: Prompt, response: str, row: Mapping[str, Any]) -> RewardResult:
    """Return 1 if the response is the reference answer. Otherwise return the matched share of the reference minus 1.

    The matched share is the length of the common prefix divided by the length of the reference. Each character is a
    turn: a matching one earns its share of the reference, the first wrong one earns -1, and the characters after it
    earn nothing. If the response ends too early, its last character earns an additional -1.

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
    return RewardResult(
        value,
        parts={"right": float(is_right)},
        turns=tuple(TurnReward(end, part) for end, part in enumerate(earned, 1)),
    )
