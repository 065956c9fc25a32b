"""Reads the task from a row, for environments whose rows contain one. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from roll.agents.environments.base import Message
from roll.data.messages import MessageFault, read_message
from roll.data.picture_parts import PICTURES


def task_of(row: Mapping[str, Any], column: str | None = None) -> list[Message]:
    """Return the messages that state the task. The column holds a list of messages, its JSON text, or the text of a
    user message.

    Messages are returned in the form of `read_message`, but with the parts of a content that shows pictures.

    Args:
        column: column that holds the task. The default is `messages`, or `prompt` if the row has no `messages`.

    Raises:
        ValueError: the row has no task, or one of its messages cannot be read.
    """
    found = row.get(column) if column else row.get("messages") or row.get("prompt")
    if isinstance(found, str) and found.lstrip().startswith("["):
        with suppress(ValueError):  # a text may begin like a JSON list
            found = json.loads(found)
    if isinstance(found, str) and found:
        return [{"role": "user", "content": found}]
    if isinstance(found, list) and found and all(isinstance(one, Mapping) for one in found):
        return [_read(one, number) for number, one in enumerate(found)]
    named = f"no '{column}'" if column else "neither 'messages' nor 'prompt'"
    raise ValueError(f"the row has {named}; it has the columns {', '.join(map(str, row))}")


def _read(message: Mapping[str, Any], number: int) -> Message:
    try:
        read = read_message(message, sees=True)
        return {**read, "content": message.get("content", message.get("value"))} if read.pop(PICTURES, ()) else read
    except MessageFault as fault:
        raise ValueError(f"message {number} {fault}{f'; {fault.remedy}' if fault.remedy else ''}") from fault


def with_more(messages: list[Message], text: str) -> list[Message]:
    """Return the messages with a text appended.

    If the last message is a user message, the text becomes part of it, because some chat templates reject two user
    messages in a row.
    """
    last, content = messages[-1], messages[-1].get("content")
    if last.get("role") != "user" or not isinstance(content, str | list):
        return [*messages, {"role": "user", "content": text}]
    added = f"\n\n{text}"
    more = content + added if isinstance(content, str) else [*content, {"type": "text", "text": added}]
    return [*messages[:-1], {**last, "content": more}]
