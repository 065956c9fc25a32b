"""Reads the task in a row, for environments whose rows state one. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from roll.environments.base import Message


def task_of(row: Mapping[str, Any], column: str | None = None) -> list[Message]:
    """Return the conversation that states the task: a list of messages, also as JSON text, or a text, which is the user's.

    Args:
        column: that holds it; `messages`, else `prompt`, if not given.

    Raises:
        ValueError: the row has none.
    """
    found = row.get(column) if column else row.get("messages") or row.get("prompt")
    if isinstance(found, str) and found.lstrip().startswith("["):
        with suppress(ValueError):  # prefix of a JSON list
            found = json.loads(found)
    if isinstance(found, str) and found:
        return [{"role": "user", "content": found}]
    if isinstance(found, list) and found and all(isinstance(one, Mapping) for one in found):
        return found
    named = f"no '{column}'" if column else "neither 'messages' nor 'prompt'"
    raise ValueError(f"the row has {named}; it has the columns {', '.join(map(str, row))}")


def with_more(messages: list[Message], text: str) -> list[Message]:
    """Append a text to messages.

    It is joined to the last message if that is the user's, because some templates refuse two user messages in a row.
    """
    last = messages[-1]
    if last.get("role") != "user" or not isinstance(last.get("content"), str):
        return [*messages, {"role": "user", "content": text}]
    return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{text}"}]
