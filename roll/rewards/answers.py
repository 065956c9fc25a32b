"""Reads the answer in a response, and the reference answer in a row. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

BOXED = "\\boxed{"
SIGN = re.compile(r"\\boxed\{|\\(?!\\boxed\{).|[{}]", re.DOTALL)
"""A brace, the beginning of a box, or an escape. An escaped brace does not count."""


def final_text(response: str) -> str:
    """Return the stripped text after the last `</think>`, the whole response if there is none."""
    return response.rpartition("</think>")[2].strip() or response.strip()


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete, non-empty `\\boxed{...}` with balanced braces, None if there is none."""
    last, content = -1, None
    opened: list[int] = []  # starts of the contents of open boxes; -1 for other open braces
    for sign in SIGN.finditer(text):
        if sign[0] != "}":
            if sign[0] in ("{", BOXED):
                opened.append(sign.end() if sign[0] == BOXED else -1)
        elif opened and (start := opened.pop()) > last and (inner := text[start : sign.start()].strip()):
            last, content = start, inner
    return content


def ground_truth(row: Mapping[str, Any]) -> str:
    """Return the row's `ground_truth`, else its `answer`. Of a worked solution that ends in `#### answer` (GSM8K), return that answer.

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
