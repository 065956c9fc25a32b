"""Converts the return value or the exception of a reward function to a `RewardResult`."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np

from roll.hosted.raised import NOTE_CHARACTERS, raised_where, trace_of
from roll.types import FP32_MAX, RewardOutcome, RewardResult, TurnReward

MOST_NOTE = 2000
"""Largest number of characters in a result's note. A longer note is truncated."""
MOST_PARTS, MOST_PART_NAME = 64, 100
"""Largest number of parts of a result, and of characters in a part's name. A result that exceeds one of them is
CRASHED.
"""


def checked_result(returned: Any, response: str) -> RewardResult:
    """Return the result of one response. The function must have returned a `RewardResult` or a number, else the result
    is CRASHED.
    """
    if isinstance(returned, RewardResult):
        return _bounded(returned, len(response))
    if not isinstance(returned, Real | np.bool_):
        return crashed(f"returned a {type(returned).__name__}, not a RewardResult or a number: {_excerpt(returned)}")
    try:
        return RewardResult(_number("returned", returned))
    except Exception as error:  # a number of a user-defined class may raise anything
        return crashed(str(error))


def verdicts(returned: Any, responses: Sequence[str]) -> list[RewardResult]:
    """Return the results of a group.

    The function must have returned a sequence with one `RewardResult` or number for each response. Otherwise all
    results, or the results in place of invalid elements, are CRASHED.
    """
    try:
        several = list(returned)
    except TypeError:
        problem = (
            f"returned a {type(returned).__name__}, "
            f"not a sequence with a result for each response: {_excerpt(returned)}"
        )
        return [crashed(problem)] * len(responses)
    if len(several) != len(responses):
        return [crashed(f"returned {len(several)} results for {len(responses)} responses")] * len(responses)
    return [checked_result(one, response) for one, response in zip(several, responses, strict=True)]


def raised(error: BaseException, caller: str) -> RewardResult:
    """Return a CRASHED result with the exception and its place in the user's code. `caller` is the file that called the
    function.
    """
    return crashed(raised_where(error, caller), trace_of(error, caller))


def crashed(note: str, trace: str = "") -> RewardResult:
    """Return the result of a call that failed."""
    return RewardResult(0.0, RewardOutcome.CRASHED, note=note[:NOTE_CHARACTERS], trace=trace)


def timed_out(seconds: float) -> RewardResult:
    """Return the result of a call that exceeded its deadline."""
    return RewardResult(0.0, RewardOutcome.TIMED_OUT, note=f"no verdict after {seconds:g} s")


def _bounded(result: RewardResult, characters: int) -> RewardResult:
    try:
        if len(result.parts) > MOST_PARTS or any(len(str(name)) > MOST_PART_NAME for name in result.parts):
            allowed = f"at most {MOST_PARTS} are allowed, with names of at most {MOST_PART_NAME} characters"
            raise ValueError(f"it has {len(result.parts)} parts; {allowed}")
        return RewardResult(
            value=_number("its value is", result.value),
            outcome=RewardOutcome(result.outcome),
            parts={str(name): _number(f"its part '{name}' is", part) for name, part in result.parts.items()},
            note=str(result.note)[:MOST_NOTE],
            turns=_turns(result.turns, characters) if result.turns and result.outcome == RewardOutcome.SCORED else (),
            score=None if result.score is None else _number("its score is", result.score),
        )
    except Exception as error:  # values of user-defined classes may raise anything
        return crashed(f"returned a malformed RewardResult: {error}")


def _number(what: str, number: Any) -> float:
    try:
        value = float(number)
    except OverflowError:
        raise ValueError(f"{what} an integer that is too large for a float") from None
    if not math.isfinite(value):
        raise ValueError(f"{what} {value}, which is not finite")
    if abs(value) > FP32_MAX:
        raise ValueError(f"{what} {value}, which is too large for fp32")
    return value


def _excerpt(returned: Any) -> str:
    return repr(returned)[:NOTE_CHARACTERS]


def _turns(turns: Sequence[TurnReward], characters: int) -> tuple[TurnReward, ...]:
    checked = tuple(
        TurnReward(operator.index(turn.end), _number("its reward of a turn is", turn.value)) for turn in turns
    )
    ends = [0, *(turn.end for turn in checked), characters + 1]
    if any(later <= earlier for earlier, later in pairwise(ends)):
        found = f"its turns end at {', '.join(map(str, ends[1:-1]))} of {characters} characters"
        raise ValueError(f"{found}; the ends must be in ascending order and within the response")
    return checked
