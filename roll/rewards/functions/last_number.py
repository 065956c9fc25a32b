"""A reward for responses whose last number is the reference answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from roll.algorithms.methods import declares
from roll.rewards.answers import final_text, ground_truth
from roll.rewards.base import REWARDS, RewardTraits
from roll.types import Prompt, RewardOutcome, RewardResult

NUMBER = re.compile(r"(?:(?<![\d.)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?")
"""Matches a number, with or without thousands separators. The minus of a subtraction is not its sign."""


def check_reference(row: Mapping[str, Any]) -> None:
    """Raise ValueError if the row has no reference answer, or one that is not a number."""
    reference = ground_truth(row)
    if not NUMBER.fullmatch(reference):
        raise ValueError(f"the reference answer {reference[:80]!r} is not a number")


def last_of(text: str, mark: str = "") -> Decimal | None:
    """Return the last number of a text; with a `mark`, the first number after the last mark. None without one."""
    if mark:
        _, found, text = text.rpartition(mark)
        number = NUMBER.search(text) if found else None
    else:
        number = next(iter(reversed(list(NUMBER.finditer(text)))), None)
    return Decimal(number[0].replace(",", "")) if number else None


@REWARDS.register("last_number")
@declares(RewardTraits(check_row=check_reference))
def last_number(prompt: Prompt, response: str, row: Mapping[str, Any], *, mark: str = "") -> RewardResult:
    """Return 1 if the last number of the response equals the reference answer, else 0.

    These are the two scores of GSM8K that others report: the lenient one, and the strict one with `mark: "####"`. Only
    the text after the last `</think>` counts, or the whole response if that text is empty.

    With a mark, the part `lenient` of the result is the score without it.

    Args:
        mark: text that must stand before the number, such as `####`. Of several, the last counts.

    Raises:
        ValueError: the row has no reference answer, or one that is not a number.
    """
    check_reference(row)
    text, right = final_text(response), last_of(ground_truth(row))
    parts = {"lenient": float(last_of(text) == right)} if mark else {}
    number = last_of(text, mark)
    if number is None:
        return RewardResult(0.0, RewardOutcome.UNPARSABLE, parts)
    return RewardResult(float(number == right), parts=parts)
