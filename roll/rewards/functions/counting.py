"""A reward for counting: a whole number, as digits or as a word."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roll.algorithms.methods import declares
from roll.rewards.answers import final_text, ground_truth, last_boxed
from roll.rewards.base import REWARDS, RewardTraits
from roll.types import Prompt, RewardOutcome, RewardResult

WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
NUMBER = re.compile(rf"(?<![\w.])(?:\d{{1,3}}(?:,\d{{3}})+|\d+|{'|'.join(WORDS)})(?!\w|[.,]\d)", re.IGNORECASE)
"""Matches a whole number that is no part of a word or of a decimal."""


def wanted_count(row: Mapping[str, Any]) -> int:
    """Return the number in the reference answer. Raises ValueError if it is no whole number."""
    reference = ground_truth(row)
    if not NUMBER.fullmatch(reference):
        raise ValueError(f"the reference answer {reference[:80]!r} is not a whole number")
    return _number(reference)


def _number(text: str) -> int:
    return WORDS.index(text.lower()) if text.lower() in WORDS else int(text.replace(",", ""))


@REWARDS.register("counting")
@declares(RewardTraits(check_row=wanted_count))
def counting(prompt: Prompt, response: str, row: Mapping[str, Any], *, partial: bool = False) -> RewardResult:
    """Return 1 if the last whole number of the response equals the reference, else 0.

    The number is that in the last `\\boxed{...}` if there is one. Numbers up to twenty may be words. Only the text
    after the thinking counts.

    Args:
        partial: a wrong number n is worth 1 - |n - m| / m for the reference m, but at least 0; 0 if m is 0.

    Raises:
        ValueError: the reference answer is not a whole number.
    """
    wanted, text = wanted_count(row), final_text(response)
    said = NUMBER.findall(last_boxed(text) or text)
    if not said:
        return RewardResult(0.0, RewardOutcome.UNPARSABLE, note="no whole number in the response")
    off = abs(_number(said[-1]) - wanted)
    near = max(0.0, 1 - off / wanted) if partial and wanted else 0.0
    return RewardResult(1.0 if off == 0 else near, note=f"counted {said[-1][:20]}")
