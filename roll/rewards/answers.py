"""Reads the answer out of a response, and the reference answer out of a row. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

BOXED = "\\boxed{"


def final_text(response: str) -> str:
    """What follows the last `</think>`, if anything does; else the whole response. Stripped."""
    return response.rpartition("</think>")[2].strip() or response.strip()


def last_boxed(text: str) -> str | None:
    """Content of the last complete, non-empty `\\boxed{...}`, braces balanced; None if there is none."""
    start = text.rfind(BOXED)
    while start >= 0:
        content = _braced(text, start + len(BOXED))
        if content:
            return content
        start = text.rfind(BOXED, 0, start)
    return None


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


def _braced(text: str, start: int) -> str | None:
    depth = 1
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[start:position].strip()
        position += 1
    return None
