"""Multiple choice in the style of CrossThinkQA, and penalties for repetition and length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from roll.rewards.functions.crossthinkqa import crossthinkqa
from roll.rewards.functions.length_penalty import length_penalty
from roll.rewards.functions.repetition_penalty import repetition_penalty
from roll.types import Prompt

PROMPT = Prompt(0, np.zeros(1, dtype=np.int32), "", "any", {})
RIGHT_BOXED, RIGHT, WRONG_BOXED, WRONG = "So \\boxed{B}", "the Answer is (B), not A", "\\boxed{A}", "the answer is A"


@pytest.mark.parametrize(
    ("reward_type", "values"), [("loose", (1, 1, -1, -1)), ("strict", (1, -1, -1, -1)), ("soft", (1, 0.5, -0.5, -1))]
)
def test_the_three_reward_types(reward_type: Any, values: tuple[float, ...]) -> None:
    for response, value in zip((RIGHT_BOXED, RIGHT, WRONG_BOXED, WRONG), values, strict=True):
        thoughtful = f"<think>\\boxed{{C}} the answer is C</think>{response}"
        assert crossthinkqa(PROMPT, thoughtful, {"ground_truth": "B"}, reward_type=reward_type).value == value
    bare = crossthinkqa(PROMPT, "B is it", {"ground_truth": "B"}, reward_type=reward_type, choice="first_capital")
    assert bare.value == values[1]  # as for an answer without a box


@pytest.mark.parametrize(
    ("response", "letter", "first"),
    [
        ("I think B", None, "I"),
        ("\\boxed{Because of B}", None, "B"),
        ("The answer is Because", None, "B"),
        ("The best choice: (B). Look at A", "B", "T"),
        ("\\boxed{\\text{B}}", "B", "B"),
        ("The answer is A or B", None, "A"),
        ("no idea", None, None),
    ],
)
def test_choice_letter_must_stand_alone_unless_roll_like(response: str, letter: str | None, first: str | None) -> None:
    for choice, found in (("letter", letter), ("first_capital", first)):
        results = [crossthinkqa(PROMPT, response, {"ground_truth": one}, choice=choice) for one in "ABIT"]  # type: ignore[arg-type]
        assert [result.score for result in results] == [float(one == found) for one in "ABIT"]
        assert results[0].note == f"answer {found}" if found else "no choice" in results[0].note


def test_the_score_of_a_choice_has_no_penalties() -> None:
    """ROLL scores 1 where the reward for the choice is above 0, whatever the penalties."""
    for response, score in [(RIGHT_BOXED, 1), (RIGHT, 1), (WRONG_BOXED, 0), (WRONG, 0), ("Never", 0)]:
        result = crossthinkqa(PROMPT, response, {"ground_truth": "B"}, response_length_penalty_coef=9.0)
        assert result.graded == score != result.value


def test_penalties_are_added() -> None:
    response = "a b c " * 20 + RIGHT_BOXED  # 62 words: 60 trigrams, of which 5 are distinct
    result = crossthinkqa(PROMPT, response, {"ground_truth": "B"}, response_length_penalty_coef=2.0)
    repeated, short = -0.5 * (1 - 5 / 60), 2.0 * -0.5 * (400 - len(response)) / 300
    assert result.parts == pytest.approx({"answer": 1.0, "repetition": repeated, "length": short})
    assert result.value == pytest.approx(1.0 + repeated + short)


@pytest.mark.parametrize(
    ("arguments", "truth"), [({"reward_type": "hard"}, "B"), ({"choice": "any"}, "B"), ({}, "three")]
)
def test_what_crossthinkqa_cannot_judge(arguments: dict[str, Any], truth: str) -> None:
    with pytest.raises(ValueError, match="reward_type is 'hard'|choice is 'any'|capital letter"):
        crossthinkqa(PROMPT, RIGHT, {"ground_truth": truth}, **arguments)


@pytest.mark.parametrize(
    ("text", "arguments", "value"),
    [
        ("", {}, 0.0),
        ("one two", {}, 0.0),
        ("one two three", {}, 0.0),
        ("go go go go go", {}, -0.5 * 2 / 3),
        ("A b a B a b", {"ngram": 2, "most": -1.0}, -3 / 5),
        ("x x x x", {"ngram": 1}, -0.5 * 3 / 4),
    ],
)
def test_repetition(text: str, arguments: dict[str, Any], value: float) -> None:
    assert repetition_penalty(PROMPT, text, {}, **arguments).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("length", "arguments", "value"),
    [
        *[(0, {}, -0.5), (99, {}, -0.5), (100, {}, -0.5), (250, {}, -0.25), (400, {}, 0.0), (10_000, {}, 0.0)],
        (0, {"short": 0, "enough": 0, "long": 100, "too_long": 200}, 0.0),
        (150, {"short": 0, "enough": 0, "long": 100, "too_long": 200, "most": -1.0}, -0.5),
        (200, {"short": 0, "enough": 0, "long": 100, "too_long": 200, "most": -1.0}, -1.0),
    ],
)
def test_length(length: int, arguments: dict[str, Any], value: float) -> None:
    assert length_penalty(PROMPT, "x" * length, {}, **arguments).value == pytest.approx(value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"most": 0.5},
        {"short": 5, "enough": 4},
        {"long": 500},
        {"long": 300, "too_long": 500},
        {"long": 500, "too_long": 450},
    ],
)
def test_penalties_out_of_bounds(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        length_penalty(PROMPT, "", {}, **arguments)
    with pytest.raises(ValueError):
        repetition_penalty(PROMPT, "", {}, most=1.0)
    with pytest.raises(ValueError):
        repetition_penalty(PROMPT, "", {}, ngram=0)
