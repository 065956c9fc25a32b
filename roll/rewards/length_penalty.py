"""A penalty for a response that is too short or too long, to be added to any domain's reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.rewards.base import REWARDS
from roll.rewards.penalties import ENOUGH, MOST, SHORT, check_penalty, excess, shortness
from roll.types import Prompt, RewardResult


@REWARDS.register("length_penalty")
def length_penalty(
    prompt: Prompt,
    response: str,
    row: Mapping[str, Any],
    *,
    short: int = SHORT,
    enough: int = ENOUGH,
    long: int | None = None,
    too_long: int | None = None,
    most: float = MOST,
) -> RewardResult:
    """Return 0 for a length from `enough` to `long` characters with thoughts, and `most` (at most 0) below `short` and from `too_long` on.

    On lines between them. Without `long` and `too_long` no response is too long; with `short` and `enough` 0 none is too short.

    Raises:
        ValueError: an argument is out of bounds.
    """
    check_penalty(most)
    if not 0 <= short <= enough or (long is None) != (too_long is None):
        raise ValueError(
            f"short {short}, enough {enough}, long {long}, too_long {too_long}: the first two must rise, the others come together"
        )
    penalty = shortness(len(response), short, enough, most)
    if long is not None and too_long is not None:
        if not enough <= long <= too_long:
            raise ValueError(f"enough {enough}, long {long} and too_long {too_long} must rise")
        penalty += excess(len(response), long, too_long, most)
    return RewardResult(penalty)
