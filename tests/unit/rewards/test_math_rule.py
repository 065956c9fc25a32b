"""Rule-based rewards for mathematics: reading and comparing answers."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.math_pairs import PAIRS, read_pairs
from roll.rewards.answers import last_boxed
from roll.rewards.functions import math_rule as module
from roll.rewards.functions.math_rule import (
    PLAIN_NUMBER,
    SEARCHED_CHARACTERS,
    answer_shape,
    is_mathematics,
    math_rule,
    math_verdict,
)
from roll.types import Prompt, RewardOutcome, RewardResult
from tests.growth import ABOUT_LINEAR, growth

PROMPT = Prompt(0, np.zeros(1, dtype=np.int32), "", "math_rule", {})


def outcome(response: str, reference: Any) -> RewardResult:
    return math_rule(PROMPT, response, {"ground_truth": reference})


RIGHT = [
    ("\\boxed{42}", "42"),
    ("42", "42"),
    ("42", 42),
    ("\\boxed{0.5}", 0.5),
    ("\\boxed{0.00001}", 1e-5),
    ("The answer is 42.", "42"),
    ("So we get $x = 42$.", "42"),
    ("reasoning without any blank line, so \\boxed{42}", "42"),
    ("<think>maybe \\boxed{41}</think>\\boxed{42}", "42"),
    ("<think>maybe 41</think>\nThe answer is 42", "42"),
    ("It is \\boxed{42}</think>", "42"),
    ("first \\boxed{41}, no: \\boxed{42}", "42"),
    ("\\boxed{42} and an unfinished \\boxed{4", "42"),
    ("\\boxed{42} and an empty \\boxed{}", "42"),
    ("\\boxed{\\frac{1}{2}}", "0.5"),
    ("\\boxed{\\frac{1}{2}}", "\\frac12"),
    ("\\boxed{0.5}", "$\\frac{1}{2}$"),
    ("\\boxed{1,234}", "1234"),
    ("\\boxed{2x+1}", "1+2x"),
    ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}"),
    ("\\boxed{42.0}", "42"),
    ("\\boxed{42}", "First 6, then 7.\n#### 42"),
    ("\\boxed{42\\%}", "42\\%"),
    ("\\boxed{42%}", "42\\%"),
    ("\\boxed{42\\%}", "42"),
    ("\\boxed{42 \\%}", "0.42"),
    ("\\boxed{42}", "42%"),
    ("\\boxed{\\frac{1}{2}\\%}", "0.5"),
    ("\\boxed{1\\,234\\,567}", "1234567"),
    ("\\boxed{1234 \\text{ cm}}", "1\\,234"),
    ("\\boxed{1234}", "\\$1,234"),
    ("\\boxed{\\$1,234.50}", "$1234.50"),
    ("\\boxed{42.}", "42"),
    ("\\boxed{x = 42.}", "42."),
    ("\\boxed{90°}", "90^\\circ"),
]
WRONG = [
    ("\\boxed{41}", "42"),
    ("41", "42"),
    ("<think>it is \\boxed{42}</think>\\boxed{41}", "42"),
    ("\\boxed{42} or rather \\boxed{41}", "42"),
    ("\\boxed{-42}", "42"),
    ("\\boxed{\\frac{1}{3}}", "0.5"),
    ("\\boxed{2x}", "2y"),
    ("\\boxed{42\\%}", "41\\%"),
    ("\\boxed{42\\%}", "4200"),
    ("\\boxed{1\\,23}", "123"),
    ("\\boxed{(1,\\,234)}", "1234"),
    ("\\boxed{1234}", "\\$1,235"),
]
UNREADABLE = ["", "   ", "I do not know.", "<think>hm</think>no idea", "\\boxed{}", "\\boxed{", "</think>"]


@pytest.mark.parametrize(("response", "reference"), RIGHT)
def test_right_answers(response: str, reference: Any) -> None:
    assert (outcome(response, reference).value, outcome(response, reference).outcome) == (1.0, RewardOutcome.SCORED)


@pytest.mark.parametrize(("response", "reference"), WRONG)
def test_wrong_answers(response: str, reference: Any) -> None:
    assert (outcome(response, reference).value, outcome(response, reference).outcome) == (0.0, RewardOutcome.SCORED)


@pytest.mark.parametrize("response", UNREADABLE)
def test_no_answer_is_unparsable_and_not_wrong(response: str) -> None:
    assert outcome(response, "42").outcome == RewardOutcome.UNPARSABLE


def test_a_reference_that_is_no_mathematics_is_unparsable() -> None:
    result = outcome("\\boxed{x+1}", "\\boxed{}")
    assert result.outcome == RewardOutcome.UNPARSABLE
    assert "reference" in result.note


def test_math_reference_is_ground_truth_or_else_answer() -> None:
    assert math_rule(PROMPT, "42", {"ground_truth": "42", "answer": "7"}).value == 1.0
    assert math_rule(PROMPT, "42", {"ground_truth": None, "answer": "42"}).value == 1.0
    with pytest.raises(ValueError, match="neither 'ground_truth' nor 'answer'"):
        math_rule(PROMPT, "42", {"solution": "42"})
    with pytest.raises(ValueError, match="'answer' is a list"):
        math_rule(PROMPT, "42", {"answer": ["42"]})


numbers = st.from_regex(PLAIN_NUMBER, fullmatch=True)
small = st.integers(-20, 20).map(str) | st.decimals(-2, 2, places=6, allow_nan=False).map(
    lambda number: format(number, "f")
)


@settings(max_examples=200)
@given(reference=numbers | small, answer=numbers | small, boxed=st.booleans())
@example(reference="0", answer="-0", boxed=True)
@example(reference="0", answer="-0.0", boxed=False)
@example(reference="7", answer="7.000", boxed=True)
@example(reference="-10", answer="-010", boxed=False)
@example(reference="0.000001", answer="0.000002", boxed=True)
@example(reference="999999999.999999", answer="999999999.999998", boxed=False)
@example(reference="123456789", answer="123456789.000001", boxed=True)
def test_the_fast_path_agrees_with_math_verify(reference: str, answer: str, boxed: bool) -> None:
    shown = f"\\boxed{{{answer}}}" if boxed else answer
    assert outcome(shown, reference).value == math_verdict(reference, shown).value


@settings(max_examples=100)
@given(number=numbers, padding=st.integers(0, 3))
def test_equal_spellings_are_right_by_both_verdicts(number: str, padding: int) -> None:
    decimals = len(number.partition(".")[2])
    spelling = f"{Decimal(number):.{min(6, decimals + padding)}f}"
    assert (
        outcome(f"\\boxed{{{spelling}}}", number).value == math_verdict(number, f"\\boxed{{{spelling}}}").value == 1.0
    )


def test_plain_numbers_never_reach_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "math_verdict", lambda *_: pytest.fail("a plain number was passed to Math-Verify"))
    assert outcome("<think>6 * 7</think>So \\boxed{42.0}.", "42").value == 1.0
    assert outcome("41", "42").value == 0.0


def test_long_unboxed_response_is_searched_at_end_only(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    monkeypatch.setattr(
        module, "math_verdict", lambda reference, answer: searched.append(answer) or math_verdict(reference, answer)
    )
    response = "we add 1 and \\( x + $ 2 and so on ( " * 2000
    outcome(response, "42")
    assert searched == [response.strip()[-SEARCHED_CHARACTERS:]]


@pytest.mark.parametrize(("close", "content"), [("", None), ("}", "4")])
def test_time_for_nested_boxes_grows_linearly(close: str, content: str | None) -> None:
    def nested(count: int) -> str:
        return "\\boxed{" * count + "4" + close * count

    assert last_boxed(nested(4000)) == content
    assert growth(last_boxed, nested, 4000) < ABOUT_LINEAR


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\\\boxed{4}", "4"),
        ("} \\boxed{4}", "4"),
        ("{ \\boxed{4}", "4"),
        ("\\boxed{\\{4\\}}", "\\{4\\}"),
        ("\\boxed{4\\\\}", "4\\\\"),
        ("\\boxed{\\boxed{4}5}", "4"),
        ("\\boxed{4\\}", None),
        ("\\boxed{ } \\boxed {4}", None),
    ],
)
def test_the_last_box(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("reference", "answer", "value"),
    [
        (r"10^{-12}", r"2 \times 10^{-12}", 0.0),
        (r"10^{-12}", r"1 \times 10^{-12}", 1.0),
        ("0", r"10^{-12}", 0.0),
        (r"\frac{1}{3000}", "0.0003333", 1.0),
    ],
)
def test_tiny_numbers_are_compared_relatively(reference: str, answer: str, value: float) -> None:
    prompt = Prompt(0, np.zeros(1, np.int32), "", "math_rule", {})
    assert math_rule(prompt, f"\\boxed{{{answer}}}", {"ground_truth": reference}).value == value


@pytest.mark.parametrize(
    ("reference", "shape"),
    [
        (r"\frac{17}{305}", "x"),
        (r"\frac{5\sqrt{3}}{7}", "x"),
        (r"\left(3, \frac{1}{2}\right)", r"\left(2, x\right)"),
        (r"\frac{1}{0}", r"\frac{2}{0}"),
        ("12345x^2+7", "222x^2+2"),
    ],
)
def test_references_have_few_shapes(reference: str, shape: str) -> None:
    assert answer_shape(reference) == shape


def test_a_reference_is_mathematics_if_its_shape_is() -> None:
    references = {pair.reference for pair in read_pairs(PAIRS)} | {
        "None",
        "\\text{yes}",
        "\\frac{1}{",
        "\\begin{matrix}",
        "%",
    }
    assert {one for one in references if is_mathematics(answer_shape(one)) != is_mathematics(one)} == set()
