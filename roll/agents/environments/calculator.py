"""Arithmetic with numbers so long that a model needs a tool for the calculation."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from roll.agents.environments.base import ENVIRONMENTS, TOOL_ERRORS, Message, Observation, Step
from roll.agents.tools import CallError, Tools

QUESTIONS, ANSWERS = ("question", "problem"), ("answer", "ground_truth")
"""Columns of a row that may hold the question and the answer. The first one with a value is used."""
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}
SIGNS = "+-"


@ENVIRONMENTS.register("calculator")
class Calculator:
    """A calculation to solve with the tool `calc`. A correct final answer earns 1.

    The task is the row's question and answer. If the row has neither, it is drawn from the seed.
    """

    def __init__(self, digits: int = 3, operators: str = "+-*", system: str | None = None) -> None:
        """
        Args:
            digits: number of digits of both numbers in a task drawn from the seed.
            operators: operators that tasks drawn from the seed may have, a subset of `+-*`.
            system: system message of the episode; by default there is none.

        Raises:
            ValueError: `digits` is below 1, or `operators` is empty or has another operator.
        """
        if digits < 1 or not operators or set(operators) - set(OPERATIONS):
            found = f"digits is {digits} and operators is '{operators}'"
            raise ValueError(f"{found}; give at least 1 digit, and one or more operators of {''.join(OPERATIONS)}")
        self._digits, self._operators, self._system = digits, operators, system
        self._tools = Tools([calc])
        self._answer = ""

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Return the question as a user message."""
        question, self._answer = self._given(row) or made(row.get("seed", seed), self._digits, self._operators)
        system = [{"role": "system", "content": self._system}] if self._system is not None else []
        return Observation([*system, {"role": "user", "content": question}], self._tools.schemas)

    def step(self, message: Message) -> Step:
        """Answer the tool calls of the message. A message without calls is the final answer and ends the episode."""
        if calls := message.get("tool_calls"):
            answers = [self._tools.answer(call) for call in calls]
            return Step(
                [answer.message for answer in answers], metrics={TOOL_ERRORS: sum(answer.failed for answer in answers)}
            )
        return Step(reward=float(_is(str(message.get("content") or ""), self._answer)), done=True)

    def close(self) -> None:
        """Do nothing."""

    def _given(self, row: Mapping[str, Any]) -> tuple[str, str] | None:
        question = next((row[name] for name in QUESTIONS if row.get(name) is not None), None)
        answer = next((row[name] for name in ANSWERS if row.get(name) is not None), None)
        if (question is None) != (answer is None):
            raise ValueError(
                f"the row needs both a question and an answer, but has only the columns {', '.join(map(str, row))}"
            )
        return None if question is None else (str(question), str(answer))


def calc(x: str) -> str:
    """Calculate a sum.

    Args:
        x: Whole numbers with + - * between them.

    Raises:
        CallError: it is not such a sum.
    """
    try:
        return str(calculate(x))
    except ValueError as error:
        raise CallError(str(error)) from error


def made(seed: int, digits: int, operators: str) -> tuple[str, str]:
    """Return the task of a seed: a question such as `347*582=`, and its answer."""
    chosen = random.Random(seed)
    left, right = (chosen.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    operator = chosen.choice(operators)
    return f"{left}{operator}{right}=", str(OPERATIONS[operator](left, right))


MOST_CHARACTERS = 200
"""Largest number of characters of an expression."""


def calculate(text: str) -> int:
    """Compute an expression of whole numbers, which may have signs, with + - * and no brackets. Products are computed
    first.

    Raises:
        ValueError: the text is not such an expression, or longer than MOST_CHARACTERS.
    """
    written = "".join(text.split()).rstrip("=")
    if len(written) > MOST_CHARACTERS:
        raise ValueError(f"a sum has at most {MOST_CHARACTERS} characters")
    total = 0
    for term in _terms(written):
        product = 1
        for factor in term.split("*"):
            if not factor.lstrip(SIGNS).isascii() or not factor.lstrip(SIGNS).isdigit():
                raise ValueError(f"'{text}' is not whole numbers with + - * between them")
            product *= int(factor.lstrip(SIGNS)) * (-1) ** factor.count("-")
        total += product
    return total


def _terms(written: str) -> list[str]:
    """Split an expression into its terms: before each sign that follows a digit."""
    terms = [""]
    for character in written:
        if character in SIGNS and terms[-1][-1:].isdigit():
            terms.append("")
        terms[-1] += character
    return terms


def _is(said: str, answer: str) -> bool:
    """Return whether the last word is the answer, ignoring commas, equals signs, full stops and dollar signs."""
    words = said.replace(",", "").replace("=", " ").split()
    return bool(words) and words[-1].strip("$.") == answer.strip()
