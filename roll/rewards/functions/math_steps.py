"""A reward for the final answer and for the equations that lead to it."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from roll.algorithms.methods import declares
from roll.rewards.base import REWARDS, RewardTraits
from roll.rewards.functions.math_rule import check_reference, math_rule
from roll.types import Prompt, RewardOutcome, RewardResult, TurnReward

NUMBER = r"\d+(?!\d)(?:,\d{3})*(?!,\d{3})(?:\.\d+(?!\d)|(?!\.\d))"
"""Matches a number, never a part of one. Possessive groups would be shorter, but Python 3.11.2 (Debian 12) matches them
wrongly.
"""
OPERATOR = r"(?:[-+*/×÷·−]|\\times|\\cdot|\\div)"
SAID = re.compile(rf"=\s*(-?\s*{NUMBER})(?![\w^%\\]|[ \t]*{OPERATOR})")
"""Matches an equals sign and a right side that is only a number."""
EXPRESSION = re.compile(rf"(?<![\w.])[(-]*{NUMBER}(?:[ \t)]*{OPERATOR}[ \t(-]*{NUMBER})+[\s)]*$")
"""Matches a left side, up to the equals sign."""
OPEN = re.compile(rf"({OPERATOR}|[\^}}\]])$")
"""Matches text after which no expression can begin, such as `x +`."""
BULLETS = ("-", "*", "+")
LONGEST = 200
"""Largest number of characters in a left side that is judged."""
MARGIN = 20
"""Characters that the search window has in addition to `LONGEST`, so that a left side that is too long is recognised.
"""
SIGNS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "×": "*", "·": "*", "÷": "/", "−": "-", ",": ""}
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LARGEST_SHARE = 0.5


@REWARDS.register("math_steps")
@declares(RewardTraits(check_row=check_reference, passes_by="answer"))
def math_steps(prompt: Prompt, response: str, row: Mapping[str, Any], *, share: float = 0.2) -> RewardResult:
    """Return the verdict of `math_rule` on the answer (1 or 0), minus `share`, plus the rewards of the equations.

    With n equations, each correct one adds share / n, and each wrong one subtracts share / n. So the reward is positive
    for a right answer and never positive for a wrong one, whatever the equations are. Each equation, such as `3 * (4 +
    5) = 27`, ends a turn; the text after the last equation is a turn too. A response without equations, or without an
    answer, gets the verdict alone. Each equation is judged on its own: a correct one earns its reward even if it does
    not contribute to the answer.

    Args:
        share: total weight of the equations, at least 0 and below 0.5.

    Raises:
        ValueError: the row has no reference answer, or `share` is out of bounds.
    """
    if not 0 <= share < LARGEST_SHARE:
        raise ValueError(f"share is {share}; it must be at least 0 and below {LARGEST_SHARE}")
    verdict = math_rule(prompt, response, row)
    judged = judge_equations(response)
    if verdict.outcome is not RewardOutcome.SCORED or not judged:
        return verdict
    part = share / len(judged)
    turns = tuple(TurnReward(end, part if right else -part) for end, right in judged)
    value = verdict.value - share + sum(turn.value for turn in turns)
    parts = {"answer": verdict.value, "right_equations": sum(right for _, right in judged) / len(judged)}
    return RewardResult(value, parts=parts, note=verdict.note, turns=turns)


def judge_equations(text: str) -> list[tuple[int, bool]]:
    """Return (index of the end, whether it is correct) of each equation that has an arithmetic expression on its left
    and a number on its right. Other equations are left out.
    """
    judged = []
    for said in SAID.finditer(text):
        window = text[max(said.start() - LONGEST - MARGIN, 0) : said.start()]
        left = EXPRESSION.search(window)
        if left is None or len(left[0]) > LONGEST:
            continue
        before = window[: left.start()].rpartition("\n")[2].strip()
        if OPEN.search(before[-MARGIN:]) and before not in BULLETS:
            continue
        holds = _holds(left[0], said[1])
        if holds is not None:
            judged.append((said.end(), holds))
    return judged


def _holds(left: str, right: str) -> bool | None:
    """Return whether the left side, rounded to the right side's decimals, equals it. None if not computable."""
    for sign, plain in SIGNS.items():
        left, right = left.replace(sign, plain), right.replace(sign, plain)
    left = left[max(left.count("(") - left.count(")"), 0) :]  # drop opening brackets that close only after the equation
    try:
        worth = _value(ast.parse(left.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError):
        return None
    said = right.replace(" ", "")
    half = Fraction(1, 2 * 10 ** len(said.partition(".")[2])) if "." in said else Fraction(0)
    return abs(worth - Fraction(said)) <= half


def _value(node: ast.expr) -> Fraction:
    """Compute an expression. Raises SyntaxError for all but numbers, minus signs and arithmetic operations."""
    match node:
        case ast.Constant(value=int() | float()):
            return Fraction(ast.unparse(node))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.BinOp() if type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise SyntaxError(ast.dump(node))
