"""Exact match, multiple choice, and finding rewards by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.config.shipped import known_rewards
from roll.errors import ConfigError
from roll.rewards.answers import final_text, last_boxed
from roll.rewards.base import REWARDS, load_reward, reward_of, rewards_of
from roll.rewards.choices import letter_of, stated_letter
from roll.rewards.functions.exact_match import exact_match
from roll.rewards.functions.last_number import last_number
from roll.rewards.functions.multiple_choice import multiple_choice
from roll.rewards.verdicts import RewardPart
from roll.types import Prompt, RewardOutcome
from tests.growth import ABOUT_LINEAR, growth

PROMPT = Prompt(0, np.zeros(1, dtype=np.int32), "", "any", {})


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("Paris", 1.0),
        (" Paris\n", 1.0),
        ("<think>Rome?</think> Paris", 1.0),
        ("paris", 0.0),
        ("Paris.", 0.0),
        ("", 0.0),
    ],
)
def test_exact_match(response: str, value: float) -> None:
    assert exact_match(PROMPT, response, {"ground_truth": "Paris"}).value == value


@pytest.mark.parametrize(
    ("response", "lenient", "strict"),
    [
        ("#### 1,080", 1.0, 1.0),
        ("1080.00 apples", 1.0, 0.0),
        ("It is $1,080.", 1.0, 0.0),
        ("#### 1080 of 2000", 0.0, 1.0),
        ("#### 7\n#### 1080", 1.0, 1.0),
        ("1090-10 = 1080", 1.0, 0.0),
        ("1090 and so 0-1080", 1.0, 0.0),
        ("-1080", 0.0, 0.0),
        ("1080, then 5", 0.0, 0.0),
        ("<think>#### 5</think>#### 1080", 1.0, 1.0),
        ("1.08e3", 1.0, 0.0),
        ("none", 0.0, 0.0),
    ],
)
def test_last_number_is_lenient_or_strict(response: str, lenient: float, strict: float) -> None:
    row = {"ground_truth": "1080"}
    marked = last_number(PROMPT, response, row, mark="####")
    assert last_number(PROMPT, response, row).value == lenient == marked.parts["lenient"]
    assert marked.value == strict and not last_number(PROMPT, response, row).parts


def test_last_number_reads_signs_and_fractions() -> None:
    assert last_number(PROMPT, "so -.5", {"answer": "so\n#### -0.50"}).value == 1.0
    assert last_number(PROMPT, "so 0.5", {"answer": "-0.5"}).value == 0.0
    assert last_number(PROMPT, "no", {"answer": "-0.5"}).outcome is RewardOutcome.UNPARSABLE
    with pytest.raises(ValueError, match="7 apples"):
        last_number(PROMPT, "7", {"answer": "7 apples"})


def test_exact_match_can_ignore_case() -> None:
    assert exact_match(PROMPT, "PARIS", {"answer": "Paris"}, ignore_case=True).value == 1.0


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("\\boxed{B}", "B"),
        ("\\boxed{\\text{B}}", "B"),
        ("\\boxed{B) because}", "B"),
        ("The answer is B.", "B"),
        ("The answer is A, no: the answer is (B)", "B"),
        ("Answer: **B**", "B"),
        ("**Answer**: B", "B"),
        ("The answer is $B$.", "B"),
        ("The answer is \\textbf{(B)}", "B"),
        ("The answer is 'B', as A's wrong", "B"),
        ("Answer - B", "B"),
        ("A's price is right", None),
        ("B", "B"),
        ("(B)", "B"),
        ("Let me see.\nB) both of them", "B"),
        ("<think>The answer is A</think>The answer is B", "B"),
        ("The answer is A fine thing. I think so", "A"),
        ("I cannot say", None),
        ("A good question", None),
        ("The answer is Apple", None),
        ("", None),
    ],
)
def test_multiple_choice(response: str, letter: str | None) -> None:
    for reference in ("A", "B"):
        result = multiple_choice(PROMPT, response, {"answer": reference})
        if letter is None:
            assert result.outcome == RewardOutcome.UNPARSABLE
        else:
            assert (result.value, result.outcome) == (float(letter == reference), RewardOutcome.SCORED)


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The correct option is B", "B"),
        ("Option B is correct", "B"),
        ("I choose B", "B"),
        ("So the answer must be B", "B"),
        ("The answer is: B", "B"),
        ("Answer: $\\boxed{B}$", "B"),
        ("answer: (b)", "B"),
        ("\\boxed{b}", "B"),
        ("The answer is **B. Paris**", "B"),
        ("Final Answer: B) Paris", "B"),
        ("B is the correct answer", "B"),
        ("the correct answer would be (C)", "C"),
        ("Answer is option C", "C"),
        ("The answer is: **(C)**", "C"),
        ("[B]", "B"),
        ("ANSWER: B", "B"),
        ("The best answer is B because A is wrong", "B"),
        ("Therefore, (B).", None),
        ("B: Paris", "B"),
        ("B - Paris", "B"),
        ("**B) Paris**", "B"),
        ("Answer B", "B"),
        ("### Answer\n\nB", "B"),
        ("the answer is not A but B", None),
        ("The answer is B. Answer A is wrong.", "B"),
        ("The answer is B, since option A is wrong", "B"),
        ("Option A is wrong.\nB", "B"),
        ("The answer is A or B", None),
        ("The answer is A, B, C or D", None),
        ("\\boxed{A, B}", None),
        ("\\boxed{A or B}", None),
        ("(A) and (B)", None),
        ("B.", "B"),
        ("**B**", "B"),
        ("B)", "B"),
        ("Boxed", None),
        ("The answer is Because", None),
        ("Answer: Apple", None),
        ("The answer is B-vitamins", None),
        ("The answer is C++", None),
        ("The answer is C#", None),
        ("The answer is A's", None),
        ("The answer is “B”.", "B"),
        ("Answer: B, because it is so", "B"),
        ("Answer: B\nExplanation: A is wrong", "B"),
        ("The answer is (B), not A", "B"),
        ("The answer is B and not A", "B"),
        ("Vitamin B", None),
        ("Plan A failed", None),
        ("I think so", None),
        ("I think B", None),
        ("It is B", None),
        ("\\boxed{\\text{(B)}}", "B"),
        ("\\boxed{\\mathbf{B}}", "B"),
        ("\\boxed{B. 12}", "B"),
        ("\\boxed{\\text{B}. 12}", "B"),
        ("\\boxed{Paris}", None),
        ("\\boxed{BC}", None),
        ("\\boxed{Option B}", "B"),
        ("Answer: A. Apple\n\nAnswer: B. Bread", "B"),
        ("answer is \\(B\\)", "B"),
        ("The answer is $\\mathrm{B}$.", "B"),
        ("<answer>B</answer>", "B"),
        ("The answer is: \n\n**B**", "B"),
        ("Answer = B", "B"),
        ("I", "I"),
        ("I would choose option D.", "D"),
        ("We select (C)", "C"),
        ("correct answer: A", "A"),
        ("Ans: B", "B"),
        ("Therefore the right choice is D) none", "D"),
        ("The answer is E.", "E"),
        ("the answers are A and C", None),
        ("So, the answer:\n(C) 12 cm", "C"),
        ("C", "C"),
        ("The answer is a", None),
        ("The answer to question A is B", "B"),
        ("The final answer is $\\boxed{\\textbf{(D)}\\ 12}$", "D"),
        ("\\boxed{\\textbf{(E) } 7}", "E"),
    ],
)
def test_a_choice_is_a_letter_that_stands_alone(response: str, letter: str | None) -> None:
    boxed = last_boxed(response)
    assert (stated_letter(response) if boxed is None else letter_of(boxed)) == letter


def test_reward_loads_by_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text("def length(prompt, response, row): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_reward("exact_match") is exact_match
    assert load_reward("own_rewards:length").__name__ == "length"


def test_the_known_rewards_are_those_that_register() -> None:
    assert known_rewards() == [
        *("anls", "code_sandbox", "counting", "crossthinkqa", "detection", "exact_match", "grounding", "ifeval"),
        *("last_number", "length_penalty", "math_rule", "math_steps", "multiple_choice", "no_reward"),
        *("reasoning_gym", "relaxed_accuracy", "repetition_penalty", "right_prefix"),
    ]
    assert [load_reward(name) for name in known_rewards()] == [REWARDS[name] for name in known_rewards()]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("math_rul", "no reward is named 'math_rul'"),
        ("process", "no reward is named 'process'"),
        ("no.such.module:reward", "No module named 'no'"),
        ("roll.rewards.base:nothing", "has no such function"),
        ("a-b", "cannot be the name of a reward"),
    ],
)
def test_unknown_reward_is_fault_with_known_names(name: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_reward(name, "rewards.math.reward")
    (fault,) = caught.value.faults
    assert fault.place == "rewards.math.reward"
    assert problem in fault.problem
    assert ", ".join(known_rewards()) in fault.remedy


def test_reward_module_import_error_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="ZeroDivisionError: division by zero"):
        load_reward("broken_rewards:any")


def part(place: str, reward: str, group: bool = False, **reward_args: Any) -> RewardPart:
    return RewardPart(place, "", reward, reward_args, group, 1.0, 0.0)


def test_a_reward_is_checked_with_its_arguments() -> None:
    assert reward_of(part("rewards.c", "exact_match", ignore_case=True)) is load_reward("exact_match")
    with pytest.raises(ConfigError, match="'absent'") as caught:
        reward_of(part("rewards.a", "absent"))
    assert [(fault.place, fault.code) for fault in caught.value.faults] == [("rewards.a.reward", "not_found")]
    with pytest.raises(
        ConfigError, match=r"rewards\.b\.parts\.c\.reward_args: .*unexpected keyword argument 'ignore_cas'"
    ):
        reward_of(part("rewards.b.parts.c", "exact_match", ignore_cas=True))


def test_plain_functions_do_not_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "awaited_rewards.py").write_text(
        "async def judge(prompt, response, row): ...\ndef plain(prompt, response, row): ..."
    )
    monkeypatch.syspath_prepend(tmp_path)
    judge, plain = part("rewards.a", "awaited_rewards:judge"), part("rewards.a", "awaited_rewards:plain")
    assert [function.__name__ for function in rewards_of("a", (judge, plain), 4)] == ["judge", "plain"]
    assert [function.__name__ for function in rewards_of("a", (plain,), 1)] == ["plain"]
    with pytest.raises(
        ConfigError, match=r"rewards\.a\.concurrency: 4, .*awaited_rewards:plain .*plain function"
    ) as caught:
        rewards_of("a", (plain,), 4)
    assert "world_size: 4" in caught.value.faults[0].remedy


@pytest.mark.parametrize(
    "thinking",
    [
        "<think>No</think>",
        "[THINK]No[/THINK]",
        "<seed:think>No</seed:think>",
        "<|channel>thought\nNo<channel|>",
        "<|channel|>analysis<|message|>No<|end|><|start|>assistant<|channel|>final<|message|>",
        "<reasoning>No</reasoning>",
    ],
)
def test_the_answer_follows_the_thinking_of_each_family(thinking: str) -> None:
    assert final_text(f"{thinking}\n\nYes") == "Yes"


@pytest.mark.parametrize("piece", ["(", "*", "answer ", "A is ", "A or ", "answer: ", " "])
def test_time_for_a_choice_grows_linearly(piece: str) -> None:
    assert growth(stated_letter, lambda count: piece * count, 2000) < ABOUT_LINEAR
