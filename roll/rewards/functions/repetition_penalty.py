"""A penalty for responses that repeat themselves, for use as a part of any domain's reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.algorithms.methods import declares
from roll.rewards.base import REWARDS, RewardTraits
from roll.rewards.functions.penalties import MOST, NGRAM, check_penalty, repetition
from roll.types import Prompt, RewardResult


@REWARDS.register("repetition_penalty")
@declares(RewardTraits(passes_at=None))
def repetition_penalty(
    prompt: Prompt, response: str, row: Mapping[str, Any], *, ngram: int = NGRAM, most: float = MOST
) -> RewardResult:
    """Return `most` times the share of word n-grams in the response, including its thinking, that repeat an earlier
    one.

    Args:
        ngram: number of words of an n-gram.
        most: the largest penalty, a number that is not positive.

    Raises:
        ValueError: an argument is out of bounds.
    """
    check_penalty(most)
    if ngram < 1:
        raise ValueError(f"ngram is {ngram}; it must be at least 1")
    return RewardResult(repetition(response, ngram, most), score=0.0)
