"""The calculator: its tasks, its tool and its reward."""

from __future__ import annotations

import random

import pytest

from roll.agents.environments.calculator import Calculator, calculate, made
from tests.unit.environments.running import calls, says


def test_a_sum_is_calculated_as_python_does() -> None:
    chosen = random.Random(5)
    for _ in range(300):
        numbers = [str(chosen.randrange(1, 10**6)) for _ in range(chosen.randrange(1, 6))]
        text = numbers[0] + "".join(chosen.choice("+-*") + number for number in numbers[1:])
        assert calculate(text) == eval(text), text  # safe, because the test itself made the expression
    assert calculate(" -3 * -4 = ") == 12
    assert calculate("1--2") == 3


@pytest.mark.parametrize("text", ["", "1+", "2**3", "a", "1/2", "(1+2)*3", "__import__('os')", "1.5", "²", "9" * 201])
def test_what_is_no_sum_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"whole numbers|at most 200"):
        calculate(text)


def test_a_seed_makes_a_task() -> None:
    for seed in range(50):
        question, answer = made(seed, 2, "+*")
        assert str(eval(question.rstrip("="))) == answer
        assert all(len(number) == 2 for number in question.rstrip("=").replace("*", "+").split("+"))
        assert made(seed, 2, "+*") == (question, answer)
    assert len({made(seed, 3, "*") for seed in range(100)}) == 100


def test_an_episode() -> None:
    world = Calculator(digits=3, operators="*")
    first = world.reset({"seed": 3}, 11)
    question, answer = made(3, 3, "*")
    assert first.messages == [{"role": "user", "content": question}]
    assert [tool["function"]["name"] for tool in first.tools] == ["calc"]
    called = world.step(calls(("calc", f'{{"x": "{question}"}}')))
    assert called.messages[0]["content"] == answer
    assert (called.done, called.reward, called.metrics) == (False, 0.0, {"tool_errors": 0})
    wrong = world.step(calls(("calc", '{"x": "1/2"}')))
    assert (wrong.done, wrong.metrics) == (False, {"tool_errors": 1})
    for said, reward in (
        (answer, 1.0),
        (f"It is {question}{answer}.", 1.0),
        (f"{answer}1", 0.0),
        ("", 0.0),
        ("1", 0.0),
    ):
        last = world.step(says(said))
        assert (last.reward, last.done) == (reward, True), said


def test_a_row_has_its_own_question() -> None:
    world = Calculator(system="Use the tool.")
    first = world.reset({"problem": "What is 12 times 12?", "answer": 144}, 0)
    assert [message["content"] for message in first.messages] == ["Use the tool.", "What is 12 times 12?"]
    assert world.step(says("$144.")).reward == 1.0
    assert Calculator().reset({}, 5) == Calculator().reset({"seed": 5}, 9)


@pytest.mark.parametrize("given", [{"digits": 0}, {"operators": "/"}, {"operators": ""}])
def test_other_arguments_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="at least 1 digit"):
        Calculator(**given)  # type: ignore[arg-type]
