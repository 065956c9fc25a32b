"""Converted rows of public data sets, and readers of their columns. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BOX = "Reason step by step, and put the final answer within \\boxed{}."
"""Instruction that Qwen2.5 was trained with for mathematics. `math_rule` reads the answer from the box."""


class LeftOut(Exception):
    """A row without anything to learn. The text is the reason, and completes a sentence that begins with "3 rows"."""


class AnotherLayout(Exception):
    """A row that does not have the layout of the set. The text is the fault."""


@dataclass(frozen=True)
class PreparedRow:
    """A line of a prepared file."""

    key: str
    """The question. Of several rows with the same key only one is written."""
    columns: Mapping[str, Any]
    """The row to write."""


def text_at(row: Mapping[str, Any], column: str) -> str:
    """Return the text in a column. Raises AnotherLayout if it is missing or not a text."""
    value = row.get(column)
    if not isinstance(value, str):
        raise AnotherLayout(_other_column(row, column, "a text"))
    return value


def number_at(row: Mapping[str, Any], column: str) -> float:
    """Return the number in a column. Raises AnotherLayout if it is missing or not a number."""
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AnotherLayout(_other_column(row, column, "a number"))
    return float(value)


def objects_at(row: Mapping[str, Any], column: str, keys: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the objects in a list, with these keys only. Raises AnotherLayout if a key is missing or not a text."""
    value = row.get(column)
    if not isinstance(value, list):
        raise AnotherLayout(_other_column(row, column, "a list"))
    for one in value:
        if not isinstance(one, Mapping) or not all(isinstance(one.get(key), str) for key in keys):
            named = " and ".join(f"'{key}'" for key in keys)
            raise AnotherLayout(f"'{column}' holds an object without a text as {named}")
    return [{key: one[key] for key in keys} for one in value]


def messages_at(row: Mapping[str, Any], column: str) -> list[dict[str, str]]:
    """Return the messages of a column with role and content only. Raises AnotherLayout if there are none."""
    found = objects_at(row, column, ("role", "content"))
    if not found:
        raise AnotherLayout(f"'{column}' has no messages")
    return found


def _other_column(row: Mapping[str, Any], column: str, kind: str) -> str:
    if row.get(column) is None:
        return f"there is no column '{column}'; the row has: {', '.join(row) or 'nothing'}"
    return f"'{column}' is not {kind}"
