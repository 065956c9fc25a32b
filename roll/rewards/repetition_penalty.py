"""A penalty for repeating oneself, to be added to any domain's reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.rewards.base import REWARDS
from roll.rewards.penalties import MOST, NGRAM, check_penalty, repetition
from roll.types import Prompt, RewardResult


@REWARDS.register("repetition_penalty")
def repetition_penalty(prompt: Prompt, response: str, row: Mapping[str, Any], *, ngram: int = NGRAM, most: float = MOST) -> RewardResult:
    """Return `most` (at most 0) times the share of repeated n-grams of words in the response, including thoughts.

    Raises:
        ValueError: an argument is out of bounds.
    """
    check_penalty(most)
    if ngram < 1:
        raise ValueError(f"ngram is {ngram}, and must be at least 1")
    return RewardResult(repetition(response, ngram, most))
