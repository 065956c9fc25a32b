"""Rewards for parts of a response, and how the reward process returns them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.rewards.functions.math_steps import judge_equations, math_steps
from roll.rewards.functions.right_prefix import right_prefix
from roll.rewards.verdicts import checked_result
from roll.types import Prompt, RewardOutcome, RewardResult, TurnReward
from tests.growth import ABOUT_LINEAR, growth

PROMPT = Prompt(0, np.zeros(1, dtype=np.int32), "", "any", {})


@pytest.mark.parametrize(
    ("response", "value", "turns"),
    [
        ("22", 1.0, [0.5, 0.5]),
        ("25", -0.5, [0.5, -1.0]),
        ("5", -1.0, [-1.0]),
        ("52", -1.0, [-1.0]),
        ("2", -0.5, [-0.5]),
        ("223", 0.0, [0.5, 0.5, -1.0]),
        ("2 2", -0.5, [0.5, -1.0]),
        ("", -1.0, []),
    ],
)
def test_right_prefix(response: str, value: float, turns: list[float]) -> None:
    said = right_prefix(PROMPT, response, {"ground_truth": "22"})
    assert said.value == pytest.approx(value)
    assert [turn.value for turn in said.turns] == pytest.approx(turns)
    assert [turn.end for turn in said.turns] == list(range(1, len(turns) + 1))
    assert said.parts["right"] == (response == "22")


@given(reference=st.text("0123", min_size=1, max_size=4), response=st.text("0123", max_size=6))
def test_right_prefix_pays_only_the_right_answer(reference: str, response: str) -> None:
    said = right_prefix(PROMPT, response, {"ground_truth": reference})
    assert (said.value > 0) == (response == reference)
    if response:
        assert sum(turn.value for turn in said.turns) == pytest.approx(said.value)


def test_right_prefix_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="empty"):
        right_prefix(PROMPT, "1", {"ground_truth": ""})


@pytest.mark.parametrize(
    ("text", "judged"),
    [
        ("7+4=11, 11+9 = 20\n20+2=23", [("7+4=11", True), ("11+9 = 20", True), ("20+2=23", False)]),
        ("3 \\times (4 + 5) = 27", [("= 27", True)]),
        ("16 − 3 − 4 = 9 eggs, 9 × 2 ÷ 3 = 6", [("= 9", True), ("= 6", True)]),
        ("(3+4=7)", [("=7", True)]),
        ("5-8=-3 and 3-(-2) = 5 and -3+5 = 3", [("=-3", True), ("= 5", True), ("= 3", False)]),
        ("10/4 = 2.5, 10/3 = 3.33, 10/3=3.4", [("= 2.5", True), ("= 3.33", True), ("=3.4", False)]),
        ("1,000 - 1 = 999", [("= 999", True)]),
        ("- 3+4 = 8\n* 2*2 = 4", [("= 8", False), ("= 4", True)]),
        ("2+3=5+1=6", [("=6", True)]),
    ],
)
def test_equations_are_worked_out(text: str, judged: list[tuple[str, bool]]) -> None:
    found = judge_equations(text)
    assert [holds for _, holds in found] == [holds for _, holds in judged]
    for (end, _), (ending, _) in zip(found, judged, strict=True):
        assert text[:end].endswith(ending)


@pytest.mark.parametrize(
    "text",
    [
        "x + 3 + 1 = 7",
        "x \\times 3 + 1 = 7",
        "2x + 3 = 7",
        "2^3 + 1 = 9",
        "\\frac{1}{2} + 3 + 1 = 5",
        "2+3 = 4 + 1",
        "2+3 = 5x",
        "2*3 = 6%",
        "10 = 2*5",
        "1/0 = 1",
        "1+" * 300 + "1 = 301",
        "a1+2=4",
        "",
    ],
)
def test_what_is_more_than_numbers_is_not_judged(text: str) -> None:
    assert judge_equations(text) == []


@given(a=st.integers(0, 9999), b=st.integers(1, 99), c=st.integers(0, 99), off=st.integers(-2, 2))
def test_equations_of_whole_numbers(a: int, b: int, c: int, off: int) -> None:
    assert [holds for _, holds in judge_equations(f"so {a} * {b} - {c} = {a * b - c + off}.")] == [off == 0]


@pytest.mark.parametrize(
    ("repeated", "end", "count"),
    [("1+", "", 20000), ("1 + 1 = 1 ", "", 500), (" ", "=", 40000), ("(", "1+1=2", 20000), ("9", "=9", 40000)],
)
def test_time_for_any_response_grows_linearly(repeated: str, end: str, count: int) -> None:
    assert growth(judge_equations, lambda number: repeated * number + end, count) < ABOUT_LINEAR


def steps(response: str, share: float = 0.2) -> RewardResult:
    return math_steps(PROMPT, response, {"answer": "22"}, share=share)


def test_steps_and_answer_by_hand() -> None:
    said = steps("7+4=11, 11+9=20, 20+2=22. \\boxed{22}")
    assert (said.value, [turn.end for turn in said.turns]) == (pytest.approx(1.0), [6, 15, 24])
    assert [turn.value for turn in said.turns] == pytest.approx([0.2 / 3] * 3)
    # One of two equations is wrong, so their rewards cancel, and the wrong answer costs `share`.
    said = steps("7+4=11, 11+9=21. \\boxed{21}")
    assert (said.value, said.parts) == (pytest.approx(-0.2), {"answer": 0.0, "right_equations": 0.5})
    assert [turn.value for turn in said.turns] == pytest.approx([0.1, -0.1])
    assert steps("1+1=3 so \\boxed{22}", share=0.4).value == pytest.approx(0.2)
    # The rest of the value is the reward for the answer.
    assert said.value - sum(turn.value for turn in said.turns) == pytest.approx(-0.2)


def test_without_steps_the_verdict_counts_alone() -> None:
    assert steps("\\boxed{22}") == RewardResult(1.0, note="answer 22")
    assert steps("\\boxed{21}").value == 0.0
    unparsable = steps("alas")
    assert (unparsable.outcome, unparsable.turns) == (RewardOutcome.UNPARSABLE, ())


@given(
    rights=st.lists(st.booleans(), max_size=5),
    answer=st.sampled_from([22, 21]),
    share=st.sampled_from([0.0, 0.2, 0.49]),
)
def test_steps_never_turn_the_verdict(rights: list[bool], answer: int, share: float) -> None:
    response = "\n".join(f"1+1={2 if right else 3}" for right in rights) + f"\n\\boxed{{{answer}}}"
    said = steps(response, share)
    assert (said.value > 1e-9) == (answer == 22)
    assert len(said.turns) == len(rights)


def test_a_share_out_of_bounds_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"share is 0.5"):
        steps("22", share=0.5)


def told(*turns: TurnReward, outcome: RewardOutcome = RewardOutcome.SCORED) -> RewardResult:
    """Return the result as it leaves the process, for a response of five characters."""
    said = checked_result(RewardResult(1.0, outcome, turns=turns), "12345")
    return pickle.loads(pickle.dumps(said))


def test_turns_leave_the_process_as_they_are() -> None:
    turns = (TurnReward(2, 0.5), TurnReward(5, -1.0))
    assert told(*turns).turns == turns
    assert told(*turns, outcome=RewardOutcome.UNPARSABLE).turns == ()


@pytest.mark.parametrize(
    ("turns", "note"),
    [
        ([TurnReward(6, 1.0)], "its turns end at 6 of 5 characters"),
        ([TurnReward(0, 1.0)], "its turns end at 0 of 5 characters"),
        ([TurnReward(3, 1.0), TurnReward(3, 1.0)], "its turns end at 3, 3 of 5 characters"),
        ([TurnReward(3, float("nan"))], "reward of a turn is nan"),
        ([TurnReward(2.5, 1.0)], "'float' object cannot be interpreted as an integer"),  # type: ignore[arg-type]
        ([(2, 1.0)], "has no attribute"),
    ],
)
def test_turns_that_make_no_sense_are_a_crash(turns: list[TurnReward], note: str) -> None:
    said = told(*turns)
    assert said.outcome is RewardOutcome.CRASHED
    assert note in said.note
