"""A reward for responses that are literally the reference answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.algorithms.methods import declares
from roll.rewards.answers import final_text, ground_truth
from roll.rewards.base import REWARDS, RewardTraits
from roll.types import Prompt, RewardResult


@REWARDS.register("exact_match")
@declares(RewardTraits(check_row=ground_truth))
def exact_match(prompt: Prompt, response: str, row: Mapping[str, Any], *, ignore_case: bool = False) -> RewardResult:
    """Return 1 if the response equals the reference answer, else 0.

    Only the text after the last `</think>` counts, or the whole response if that text is empty. White space at both
    ends of this text and of the reference answer is ignored.

    Args:
        ignore_case: compare without regard to case.

    Raises:
        ValueError: the row has no reference answer.
    """
    answer, reference = final_text(response), ground_truth(row).strip()
    if ignore_case:
        answer, reference = answer.casefold(), reference.casefold()
    return RewardResult(float(answer == reference))
