"""A reward for responses whose final answer is equal to the reference answer, as judged by math-verify."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, LatexNormalizationConfig, parse, verify

from roll.algorithms.methods import declares
from roll.rewards.answers import final_text, ground_truth, last_boxed
from roll.rewards.base import REWARDS, RewardTraits
from roll.rewards.notation import WRAPPED, in_text, range_of, standard
from roll.rewards.quantities import PERCENT, Quantity, in_words, quantity
from roll.types import Prompt, RewardOutcome, RewardResult

# math-verify warns once that its alarm-based timeouts are off. They are off on purpose: the reward worker ends calls
# that time out.
logging.getLogger("math_verify").setLevel(logging.ERROR)

PLAIN_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,8})(?:\.[0-9]{1,6})?")
"""Matches numbers that are compared exactly here. math-verify would agree: it rounds to 6 decimals and uses 15 digits.
"""
MARKED = re.compile(r"\\boxed|\\\(|\\\[|(?<!\\)\$.+(?<!\\)\$", re.DOTALL)
"""Matches a reference answer that already marks its mathematics. A single dollar sign is a currency."""
NORMALISATION = LatexNormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
)
READERS = (LatexExtractionConfig(normalization_config=NORMALISATION), ExprExtractionConfig())
DIGITS, SIMPLE = re.compile("[0-9]+"), re.compile(r"\\[dt]?frac\{-?[2x.]+\}\{[2x.]+\}|\\sqrt\{[2x.]+\}")
OPENED = re.compile(r"(?:\\left\s*)?(\(|\\\{)")
TINY, RELATIVE = 1e-3, 1e-3
"""See `differ_when_tiny`. The first is also the magnitude from which 6 decimals hold at least 3 digits."""
LONGEST_FORMULA = 1000
"""Largest number of characters in a formula whose notation is rewritten. A longer one is read as it is."""
SEARCHED_CHARACTERS = 4000
"""Characters at a response's end that are searched for an answer without a box, which takes quadratic time."""
NO_VALUE = ("None", "null", "N/A")
"""References that say that there is none; math-verify reads a product of letters."""


def check_reference(row: Mapping[str, Any]) -> None:
    """Raise ValueError if the row has no reference answer, or one that is not mathematics."""
    reference = ground_truth(row)
    if reference in NO_VALUE:
        raise ValueError(f"the reference answer {reference!r} is the text of a missing value")
    if PLAIN_NUMBER.fullmatch(reference) or is_mathematics(answer_shape(reference)):
        return
    if all(isinstance(found, str) for found in read_reference(reference)):
        raise ValueError(f"the reference answer {reference[:80]!r} is not mathematics")


@lru_cache(1 << 14)
def is_mathematics(reference: str) -> bool:
    """Return whether math-verify reads an expression in a reference answer."""
    return any(not isinstance(found, str) for found in read_reference(reference))


def answer_shape(reference: str) -> str:
    """Return a reference answer with other numbers, and with a variable for each fraction and root of numbers and
    variables.

    math-verify reads the one if it reads the other. It takes milliseconds for each text, and a data set has few shapes.
    """
    shape, before = (
        DIGITS.sub(lambda number: "2" * min(len(number[0]), 3) if number[0].strip("0") else "0", reference),
        None,
    )
    while shape != before:
        shape, before = SIMPLE.sub("x", shape), shape
    return shape


@lru_cache(1 << 14)
def read_reference(reference: str) -> list[Any]:
    """Return what math-verify reads in a reference answer: expressions, and last the text. Empty for nothing."""
    if MARKED.search(reference) and not WRAPPED.fullmatch(reference):
        return read(in_text(reference, lambda formula: split_unit(formula, is_reference=True).value))
    return read(as_latex(reference_quantity(reference).value))


@lru_cache(1 << 14)
def reference_quantity(reference: str) -> Quantity:
    """Return the value and the unit of a reference answer."""
    return split_unit(reference, is_reference=True)


def read(text: str) -> list[Any]:
    """Return what math-verify reads in a text. It removes no units, as it would take variables for them."""
    return parse(text, READERS, parsing_timeout=None)  # type: ignore[arg-type]  # None turns the alarm off


def split_unit(formula: str, is_reference: bool, has_variables: bool = False) -> Quantity:
    """Return the value, in the notation that math-verify reads, and the unit of a formula.

    If the reference has variables, letters after a number in a response are no unit.
    """
    if len(formula) > LONGEST_FORMULA:
        return Quantity(formula)
    marked = quantity(standard(formula))
    return marked if has_variables else in_words(marked, is_reference)


@REWARDS.register("math_rule")
@declares(RewardTraits(check_row=check_reference))
def math_rule(prompt: Prompt, response: str, row: Mapping[str, Any]) -> RewardResult:
    """Return 1 for the right answer, 0 for a wrong one, and UNPARSABLE for a response without an answer.

    The answer is the last `\\boxed{...}` after the thinking. If nothing follows the thinking, the whole response is
    searched. If there is no box, the answer is the last mathematical expression. The reference is the row's
    `ground_truth`, else its `answer`. A unit counts only if both have one. A range such as `3-5` equals only the same
    range.

    Raises:
        ValueError: the row has no reference answer.
    """
    reference = ground_truth(row)
    text = final_text(response)
    boxed = last_boxed(text)
    answer = text if boxed is None else boxed
    if PLAIN_NUMBER.fullmatch(reference) and PLAIN_NUMBER.fullmatch(answer):
        return RewardResult(float(Decimal(reference) == Decimal(answer)), note=f"answer {answer}")
    ranges = range_of(reference), range_of(answer)
    if any(ranges):
        return RewardResult(float(ranges[0] == ranges[1]), note=f"answer {answer[:80]}")
    return math_verdict(reference, text[-SEARCHED_CHARACTERS:] if boxed is None else f"\\boxed{{{boxed}}}")


def math_verdict(reference: str, answer: str) -> RewardResult:
    """Return math-verify's verdict. `answer` is a box, or a text to search for an answer."""
    expected = read_reference(reference)
    if not expected:
        return RewardResult(
            0.0, RewardOutcome.UNPARSABLE, note=f"the reference answer {reference[:80]!r} is not mathematics"
        )
    asked = reference_quantity(reference)
    formulas: list[Quantity] = []

    def value_of(formula: str) -> str:
        formulas.append(split_unit(formula, is_reference=False, has_variables=not asked.is_numeric))
        return formulas[-1].value

    boxed = last_boxed(answer)
    found = read(in_text(answer, value_of) if boxed is None else as_latex(value_of(boxed)))
    if not found:
        return RewardResult(0.0, RewardOutcome.UNPARSABLE, note="no answer in the response")
    is_right = verify(expected, found, timeout_seconds=None, allow_set_relation_comp=True) and not differ_when_tiny(
        expected, found
    )
    is_right = is_right and not any(
        asked.contradicts(given) or are_pair_and_set(asked, given) for given in formulas[-1:]
    )
    return RewardResult(float(is_right), note=f"answer {str(found[-1])[:80]}")


def are_pair_and_set(one: Quantity, other: Quantity) -> bool:
    """Return whether one answer is a pair or interval, the other a set. math-verify compares only members."""
    return {"(", "\\{"} == {found[1] for answer in (one, other) if (found := OPENED.match(answer.value))}


def differ_when_tiny(expected: Sequence[Any], found: Sequence[Any]) -> bool:
    """Return whether both answers are numbers below TINY that differ by more than a relative RELATIVE.

    math-verify rounds to 6 decimals, so that 1e-12 and 2e-12 are equal to it.
    """
    pairs = [(float(one), float(other)) for one in _numbers(expected) for other in _numbers(found)]
    return bool(pairs) and all(
        max(abs(one), abs(other)) < TINY and abs(one - other) > RELATIVE * max(abs(one), abs(other))
        for one, other in pairs
    )


def _numbers(parsed: Sequence[Any]) -> list[Any]:
    return [one for one in parsed if getattr(one, "is_number", False) and one.is_real]


def as_latex(answer: str) -> str:
    """Return an answer as LaTeX that math-verify recognises: in a box, or as a percentage."""
    percent = PERCENT.fullmatch(answer)
    return f"${percent[1]}$%" if percent else f"\\boxed{{{answer}}}"
