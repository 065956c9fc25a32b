"""Extracts the answer from a response, and the reference answer from a row of the data. Pure functions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from roll.models.thinking import THINKING_END

BOXED = ("\\boxed{", "\\fbox{")
SIGN = re.compile(r"\\(?:boxed|fbox)\{|\\(?!\\(?:boxed|fbox)\{).|[{}]", re.DOTALL)
"""Matches a brace, the start of a box, or an escaped character. Escaped braces do not count as braces."""


def final_text(response: str) -> str:
    """Return the stripped text after the thinking. If that text is empty, return the whole response, stripped."""
    return after_thinking(response) or response.strip()


def after_thinking(response: str) -> str:
    """Return the stripped text after the last mark that ends thinking (`THINKING_END`), or all without one."""
    return THINKING_END.split(response)[-1].strip()


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete, non-empty `\\boxed{...}` or `\\fbox{...}`; None without one."""
    last, content = -1, None
    opened: list[int] = []  # for each open brace: where the content starts if the brace opens a box, else -1
    for sign in SIGN.finditer(text):
        if sign[0] != "}":
            if sign[0] in ("{", *BOXED):
                opened.append(sign.end() if sign[0] in BOXED else -1)
        elif opened and (start := opened.pop()) > last and (inner := text[start : sign.start()].strip()):
            last, content = start, inner
    return content


MISSING = ("nan", "NaN", "<NA>", "NaT")
"""What pandas and CSV files write for a value that is missing."""


def reference_text(row: Mapping[str, Any]) -> str | None:
    """Return the reference of a row as text, for records: its `ground_truth`, as rewards read it, or else the value of
    this column as it is, which a user's own reward may read. Values other than texts become JSON. None without one.
    """
    try:
        return ground_truth(row)
    except ValueError:
        value = row.get(_column(row))
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _column(row: Mapping[str, Any]) -> str:
    """Return the column of a row that has the reference answer."""
    return "answer" if row.get("ground_truth") in (None, "") and row.get("answer") is not None else "ground_truth"


def ground_truth(row: Mapping[str, Any]) -> str:
    """Return the reference answer: the row's `ground_truth`, or its `answer` if it has no `ground_truth`.

    If the column holds a worked solution that ends in `#### answer` (GSM8K), return the text after `####`.

    Raises:
        ValueError: the row has neither column, or the value is empty or missing, or is neither a string nor a number.
    """
    value = row.get(column := _column(row))
    if isinstance(value, str):
        reference = value.rpartition("####")[2].strip()
        if reference and reference not in MISSING:
            return reference
        problem = "the text of a missing value" if reference else "empty"
        raise ValueError(f"'{column}' is {value[-40:]!r}: the reference answer is {problem}")
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return format(Decimal(repr(value)), "f")
    if value is None:
        raise ValueError("the row has neither 'ground_truth' nor 'answer'")
    found = value if isinstance(value, float) else f"a {type(value).__name__}"
    raise ValueError(f"'{column}' is {found}, neither a string nor a number")
