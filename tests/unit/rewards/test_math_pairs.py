"""Answers to mathematics that a person judged: `math_rule` gives the person's verdict on each, but for the misses named
here.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.math_pairs import PAIRS, Pair, by_math_rule, read_pairs, wrong_verdicts
from roll.rewards.functions.math_rule import answer_shape, split_unit
from roll.rewards.notation import in_text, range_of, standard
from roll.rewards.quantities import Quantity, in_words, named, quantity

MISSES = {("12", "\\boxed{12 red apples}"), ("1 \\text{ m}", "\\boxed{100 \\text{ cm}}")}
"""Right answers that `math_rule` calls wrong: words of three letters may be variables, and units are not converted."""
JUDGED = read_pairs(PAIRS)


@pytest.mark.parametrize("pair", JUDGED, ids=lambda pair: f"line-{pair.line}")
def test_math_verdicts_match_human_ones(pair: Pair) -> None:
    is_missed = (pair.reference, pair.response) in MISSES
    assert by_math_rule(pair.reference, pair.response) == (pair.is_right and not is_missed)


def test_math_pairs_are_unique_with_both_verdicts() -> None:
    assert len({(pair.reference, pair.response) for pair in JUDGED}) == len(JUDGED) >= 200
    assert sum(not pair.is_right for pair in JUDGED) >= 70
    assert all((pair.reference, pair.response) not in MISSES or pair.is_right for pair in JUDGED)


def test_wrong_verdicts_are_those_that_differ() -> None:
    right, wrong = Pair(1, True, "a", "a"), Pair(2, False, "a", "b")
    assert wrong_verdicts([right, wrong], lambda reference, response: True) == [wrong]
    assert wrong_verdicts([right, wrong], lambda reference, response: reference == response) == []


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("½", r"\frac{1}{2}"),
        ("x¹⁰", "x^{10}"),
        ("0.1(6)", r"\frac{1}{6}"),
        ("2.718281828...", "2.718281828..."),
        ("1 234 567", "1234567"),
        ("(1,234)", "(1,234)"),
        ("12 1/2", r"\frac{25}{2}"),
        ("11 2/2", "11 2/2"),
        ("2**10", "2^{10}"),
        ("√(x+1)", r"\sqrt{x+1}"),
        ("**5**", "5"),
        (r"\text{Answer: 5}", "5"),
    ],
)
def test_notations_are_made_standard(written: str, value: str) -> None:
    assert standard(written) == value


@pytest.mark.parametrize(
    "answer", ["5", "5 \\text{ m/s}", "a+b", "\\boxed{", "((", "√", "½½", "", "$", "\\text{", "^", "((1,000)"]
)
def test_the_standard_notation_is_its_own(answer: str) -> None:
    assert standard(standard(answer)) == standard(answer)


@pytest.mark.parametrize(
    ("answer", "ends"), [("3-5", (3, 5)), ("3 – 5", (3, 5)), ("5-3", None), ("-3-5", None), ("x-5", None)]
)
def test_a_range_ascends(answer: str, ends: tuple[int, int] | None) -> None:
    assert range_of(answer) == ends


@pytest.mark.parametrize(
    ("text", "unit"),
    [("kilometres per hour", "km/h"), ("square cm", "cm^2"), ("mph", "mi/h"), ("apples", None), ("m/s^2", "m/s^2")],
)
def test_units_have_one_name(text: str, unit: str | None) -> None:
    assert named(text) == unit


def test_letters_of_a_reference_are_variables_unless_apart() -> None:
    assert in_words(Quantity("5cm"), is_reference=True) == Quantity("5cm")
    assert in_words(Quantity("5 cm"), is_reference=True) == Quantity("5", "cm")
    assert in_words(Quantity("5 m"), is_reference=True) == Quantity("5 m")
    assert in_words(Quantity("5 m"), is_reference=False) == Quantity("5", "m")
    assert in_words(Quantity("5t"), is_reference=False) == Quantity("5t")


def test_a_unit_contradicts_only_another_known_one() -> None:
    celsius, degrees, fahrenheit = quantity(r"5^\circ C"), quantity(r"5^\circ"), quantity(r"5^\circ\text{F}")
    assert celsius.contradicts(fahrenheit) and not celsius.contradicts(degrees)
    assert not Quantity("5").contradicts(celsius) and Quantity("5", "m").contradicts(Quantity("5", "min"))


PIECES = st.sampled_from(
    [
        "1",
        "000",
        ",",
        ".",
        "...",
        "\\frac",
        "{",
        "}",
        "(",
        ")",
        "√",
        "sqrt",
        "^",
        "_",
        "\\text{ cm}",
        "\\text{",
        "\\circ",
        "$",
        "%",
        "x",
        "e",
    ]
    + [
        "-",
        "–",
        "½",
        "²",
        "₂",
        "\\overline{3}",
        " ",
        "\\,",
        "**",
        "/",
        "\\left(",
        "Answer: ",
        "π",
        "million",
        "m",
        "٣",
        "②",
        "1̇",
        "\n",
        "\\",
    ]
)


@settings(max_examples=300)
@given(pieces=st.lists(PIECES, max_size=14), is_reference=st.booleans())
def test_no_answer_breaks_the_rewriting(pieces: list[str], is_reference: bool) -> None:
    text = "".join(pieces)
    assert isinstance(split_unit(text, is_reference).value, str) and isinstance(in_text(text), str)
    assert isinstance(answer_shape(text), str)
    range_of(text)


def test_a_long_reference_has_a_shape() -> None:
    assert answer_shape("7" * 5000) == "222" and answer_shape("0" * 5000) == "0"
