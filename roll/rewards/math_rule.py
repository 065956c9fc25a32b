"""A reward for responses whose final answer is mathematically equal to the reference answer, as judged by math-verify."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from roll.algorithms.methods.base import declares
from roll.rewards.answers import final_text, ground_truth, last_boxed
from roll.rewards.base import REWARDS, RewardTraits
from roll.types import Prompt, RewardOutcome, RewardResult

# math-verify warns once that its alarm-based timeouts are off. They are off on purpose: process.py ends calls that time out.
logging.getLogger("math_verify").setLevel(logging.ERROR)

PLAIN_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,8})(?:\.[0-9]{1,6})?")
"""Matches numbers that are compared exactly here. math-verify would agree: it rounds to 6 decimals and uses 15 digits."""
MARKED = re.compile(r"\\boxed|\\\(|\\\[|(?<!\\)\$.+(?<!\\)\$", re.DOTALL)
"""Matches a reference answer that already marks its mathematics. A single dollar sign is a currency."""
THIN_SPACE = re.compile(r"(?<=\d)\\,(?=\d{3}(?!\d))")
"""Thin space (`\\,`) as a thousands separator."""
PERCENT = re.compile(r"(.*[\d)}])\s*\\?%", re.DOTALL)
TINY, RELATIVE = 1e-3, 1e-3
"""See `differ_when_tiny`. The first is also the magnitude from which 6 decimals hold at least 3 digits."""
SEARCHED_CHARACTERS = 4000
"""Number of characters at the end of a response that are searched for an answer without a box. The search takes quadratic time."""


def check_reference(row: Mapping[str, Any]) -> None:
    """Raise ValueError if the row has no reference answer, or one that is not mathematics."""
    reference = ground_truth(row)
    if not PLAIN_NUMBER.fullmatch(reference) and all(isinstance(found, str) for found in read_reference(reference)):
        raise ValueError(f"the reference answer {reference[:80]!r} is not mathematics")


@lru_cache(1 << 14)
def read_reference(reference: str) -> Sequence[Any]:
    """Return what math-verify reads in a reference answer: expressions, and last the text itself. Empty if it reads nothing."""
    written = reference if MARKED.search(reference) else as_latex(reference)
    return parse(written, parsing_timeout=None)  # type: ignore[arg-type]  # None turns the alarm off


@REWARDS.register("math_rule")
@declares(RewardTraits(check_row=check_reference))
def math_rule(prompt: Prompt, response: str, row: Mapping[str, Any]) -> RewardResult:
    """Return 1 for the right answer, 0 for a wrong one, and UNPARSABLE for a response without an answer.

    The answer is the last `\\boxed{...}` after the thinking. If nothing follows the thinking, the whole response is searched. If there
    is no box, the answer is the last mathematical expression. The reference is the row's `ground_truth`, else its `answer`.

    Raises:
        ValueError: the row has no reference answer.
    """
    reference = ground_truth(row)
    text = final_text(response)
    boxed = last_boxed(text)
    answer = text if boxed is None else boxed
    if PLAIN_NUMBER.fullmatch(reference) and PLAIN_NUMBER.fullmatch(answer):
        return RewardResult(float(Decimal(reference) == Decimal(answer)), note=f"answer {answer}")
    return judge(reference, text[-SEARCHED_CHARACTERS:] if boxed is None else as_latex(boxed))


def judge(reference: str, answer: str) -> RewardResult:
    """Return math-verify's verdict. `answer` is a text to search for an answer, or a return value of `as_latex`."""
    expected = list(read_reference(reference))
    if not expected:
        return RewardResult(0.0, RewardOutcome.UNPARSABLE, note=f"the reference answer {reference[:80]!r} is not mathematics")
    found = parse(answer, parsing_timeout=None)  # type: ignore[arg-type]
    if not found:
        return RewardResult(0.0, RewardOutcome.UNPARSABLE, note="no answer in the response")
    is_right = verify(expected, found, timeout_seconds=None) and not differ_when_tiny(expected, found)
    return RewardResult(float(is_right), note=f"answer {str(found[-1])[:80]}")


def differ_when_tiny(expected: Sequence[Any], found: Sequence[Any]) -> bool:
    """Return whether both answers are numbers below TINY that differ by more than a relative RELATIVE.

    math-verify rounds to 6 decimals, so that 1e-12 and 2e-12 are equal to it.
    """
    pairs = [(float(one), float(other)) for one in _numbers(expected) for other in _numbers(found)]
    return bool(pairs) and all(
        max(abs(one), abs(other)) < TINY and abs(one - other) > RELATIVE * max(abs(one), abs(other)) for one, other in pairs
    )


def _numbers(parsed: Sequence[Any]) -> list[Any]:
    return [one for one in parsed if getattr(one, "is_number", False) and one.is_real]


def as_latex(answer: str) -> str:
    """Return an answer as LaTeX that math-verify recognises: in a box, or as a percentage.

    A final full stop and thin spaces are removed, and `°` becomes `^\\circ`.
    """
    if answer.endswith(".") and not answer.endswith(".."):
        answer = answer[:-1]
    answer = THIN_SPACE.sub("", answer.replace("°", "^\\circ"))
    percent = PERCENT.fullmatch(answer)
    return f"${percent[1]}$%" if percent else f"\\boxed{{{answer}}}"
