"""A reward for text that is read from a picture: its normalised edit distance to the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.algorithms.methods import declares
from roll.rewards.answers import final_text, ground_truth, last_boxed
from roll.rewards.base import REWARDS, RewardTraits
from roll.types import Prompt, RewardResult

LONGEST = 20_000
"""Largest number of characters that are compared. A longer response is worth 0."""


def references(row: Mapping[str, Any]) -> list[str]:
    """Return the reference answers: the texts of the column `answers` if it is a list, else the one of `ground_truth`.

    Raises:
        ValueError: there is none.
    """
    several = row.get("answers")
    texts = [text for text in several if isinstance(text, str) and text.strip()] if isinstance(several, list) else []
    return texts or [ground_truth(row)]


def edit_distance(one: str, other: str) -> int:
    """Return the smallest number of characters to insert, delete or replace that makes one text the other.

    The algorithm is Myers's (1999) in the form of Hyyro (2003): a column of the table of distances is two whole numbers
    with a bit for each character of `one`.
    """
    if not one:
        return len(other)
    masks: dict[str, int] = {}
    for place, character in enumerate(one):
        masks[character] = masks.get(character, 0) | 1 << place
    whole, last, distance = (1 << len(one)) - 1, 1 << (len(one) - 1), len(one)
    rising, falling = whole, 0
    for character in other:
        equal = masks.get(character, 0)
        diagonal = (((equal & rising) + rising) ^ rising) | equal | falling
        right, left = falling | (whole & ~(diagonal | rising)), rising & diagonal
        distance += bool(right & last) - bool(left & last)
        right, left = (right << 1 | 1) & whole, left << 1 & whole
        rising, falling = left | (whole & ~(diagonal | right)), right & diagonal
    return distance


@REWARDS.register("anls")
@declares(RewardTraits(check_row=references))
def anls(
    prompt: Prompt, response: str, row: Mapping[str, Any], *, least: float = 0.5, ignore_case: bool = True
) -> RewardResult:
    """Return the similarity of the response to the reference that is most similar: 1 - distance / longer length.

    It is the score ANLS of ST-VQA and DocVQA (arXiv 1905.13648), whose mean over rows is reported. The response is the
    last `\\boxed{...}` of the text after the thinking, or all of this text. Runs of white space count as one space.

    Args:
        least: a similarity below this is worth 0.
        ignore_case: compare without regard to case.

    Raises:
        ValueError: the row has no reference answer.
    """
    text = final_text(response)
    said = _plain(last_boxed(text) or text, ignore_case)
    if len(said) > LONGEST:
        return RewardResult(0.0, note=f"more than {LONGEST} characters")
    best = max(_similarity(said, _plain(reference, ignore_case)) for reference in references(row))
    return RewardResult(best if best >= least else 0.0)


def _plain(text: str, ignore_case: bool) -> str:
    joined = " ".join(text.split())
    return joined.casefold() if ignore_case else joined


def _similarity(one: str, other: str) -> float:
    return 1 - edit_distance(one, other) / max(len(one), len(other), 1)
