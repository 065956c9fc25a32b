"""Reads the answer out of a response, and the reference answer out of a row. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

BOXED = "\\boxed{"
SIGN = re.compile(r"\\boxed\{|\\(?!\\boxed\{).|[{}]", re.DOTALL)
"""A brace, the beginning of a box, or an escape, which hides the brace that it is of."""


def final_text(response: str) -> str:
    """The stripped text after the last `</think>`; the whole response if there is none."""
    return response.rpartition("</think>")[2].strip() or response.strip()


def last_boxed(text: str) -> str | None:
    """Content of the last complete, non-empty `\\boxed{...}`, braces balanced; None if there is none."""
    last, content = -1, None
    opened: list[int] = []  # where the contents of open boxes begin; -1 for other open braces
    for sign in SIGN.finditer(text):
        if sign[0] != "}":
            if sign[0] in ("{", BOXED):
                opened.append(sign.end() if sign[0] == BOXED else -1)
        elif opened and (start := opened.pop()) > last and (inner := text[start : sign.start()].strip()):
            last, content = start, inner
    return content


def ground_truth(row: Mapping[str, Any]) -> str:
    """The row's `ground_truth`, else its `answer`; of a worked solution that ends in `#### answer` (GSM8K), that answer.

    Raises:
        ValueError: the row has neither, or it is not a text or a number.
    """
    column = "ground_truth" if row.get("ground_truth") is not None else "answer"
    value = row.get(column)
    if isinstance(value, str):
        return value.rpartition("####")[2].strip()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return format(Decimal(repr(value)), "f")
    raise ValueError("the row has neither 'ground_truth' nor 'answer'" if value is None else f"'{column}' is a {type(value).__name__}")
