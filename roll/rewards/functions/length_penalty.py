"""A penalty for responses that are too short or too long, for use as a part of any domain's reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.algorithms.methods import declares
from roll.rewards.base import REWARDS, RewardTraits
from roll.rewards.functions.penalties import ENOUGH, MOST, SHORT, check_penalty, excess, shortness
from roll.types import Prompt, RewardResult


@REWARDS.register("length_penalty")
@declares(RewardTraits(passes_at=None))
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
    """Return a penalty for the length of the response in characters, including its thinking.

    The penalty is 0 from `enough` to `long` characters, `most` below `short` and from `too_long` on, and linear in
    between. Without `long` and `too_long` no response is too long. With `short` and `enough` set to 0 no response is
    too short.

    Args:
        short: below this length the penalty is `most`.
        enough: from this length on a response is not too short.
        long: up to this length a response is not too long.
        too_long: from this length on the penalty is `most`.
        most: the largest penalty, a number that is not positive.

    Raises:
        ValueError: an argument is out of bounds.
    """
    check_penalty(most)
    if not 0 <= short <= enough or (long is None) != (too_long is None):
        raise ValueError(
            f"short {short}, enough {enough}, long {long}, too_long {too_long}: short must be from 0 to enough; "
            "give long and too_long together or not at all"
        )
    penalty = shortness(len(response), short, enough, most)
    if long is not None and too_long is not None:
        if not enough <= long <= too_long:
            raise ValueError(f"enough {enough}, long {long} and too_long {too_long} must be in ascending order")
        penalty += excess(len(response), long, too_long, most)
    return RewardResult(penalty, score=0.0)
