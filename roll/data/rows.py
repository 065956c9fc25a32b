"""What a row must look like: reads the conversation out of it, or says what is wrong with it. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roll.config.schema_model import DataArgs
from roll.errors import DataError, Fault
from roll.registry import nearest

ROLES = ("system", "user", "assistant", "tool")
Conversation = list[dict[str, str]]


class RowFault(Exception):
    """A row that cannot be used."""

    def __init__(self, reason: str, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.reason = reason
        """A few words without the row's values; the report counts rows by it."""
        self.problem, self.remedy = problem, remedy


def check_columns(data_args: DataArgs, with_response: bool) -> None:
    """Raises DataError unless exactly one of `messages` and `prompt` is set, and what goes with `prompt`."""
    if (data_args.messages is None) == (data_args.prompt is None):
        problem = "is set beside `prompt`" if data_args.messages is not None else "is not set, and neither is `prompt`"
        raise DataError([Fault("data_args.messages", problem, "set one: the column of message lists, or the column of prompt texts")])
    if with_response and data_args.prompt is not None and data_args.response is None:
        remedy = "set it to the column that holds the response to learn"
        raise DataError([Fault("data_args.response", "is not set, though `prompt` is", remedy)])


def prompt_conversation(row: Mapping[str, Any], data_args: DataArgs) -> Conversation:
    """The messages that the policy is to answer.

    Raises:
        RowFault: a column is missing, of a wrong type or empty, or the last message is the assistant's.
    """
    if data_args.messages is None:
        return _prompt(row, data_args)
    conversation = _messages(row, data_args.messages)
    if conversation[-1]["role"] not in ("user", "tool"):
        problem = f"'{data_args.messages}' ends with a message of the role '{conversation[-1]['role']}'"
        raise RowFault("messages end with the wrong role", problem, "end the list with the user's message that the policy is to answer")
    return conversation


def example_conversation(row: Mapping[str, Any], data_args: DataArgs) -> Conversation:
    """The messages of an SFT example; the last is the assistant's, which is to be learnt.

    Raises:
        RowFault: as `prompt_conversation`, or the last message is not the assistant's.
    """
    if data_args.messages is None:
        assert data_args.response is not None, "check_columns comes first"
        return [*_prompt(row, data_args), {"role": "assistant", "content": _text(row, data_args.response)}]
    conversation = _messages(row, data_args.messages)
    if conversation[-1]["role"] != "assistant":
        problem = f"'{data_args.messages}' ends with a message of the role '{conversation[-1]['role']}'"
        raise RowFault("messages end with the wrong role", problem, "end the list with the assistant's message that is to be learnt")
    if len(conversation) == 1:
        raise RowFault("messages without a prompt", f"'{data_args.messages}' holds the response alone", "put the user's message before it")
    return conversation


def _prompt(row: Mapping[str, Any], data_args: DataArgs) -> Conversation:
    assert data_args.prompt is not None, "check_columns comes first"
    question = {"role": "user", "content": _text(row, data_args.prompt)}
    return [{"role": "system", "content": data_args.system}, question] if data_args.system else [question]


def _messages(row: Mapping[str, Any], column: str) -> Conversation:
    messages = _column(row, column)
    remedy = f"make '{column}' a list of objects with a `role` ({', '.join(ROLES)}) and a text as `content`"
    if not isinstance(messages, list):
        raise RowFault("messages are not a list", f"'{column}' is a {type(messages).__name__}: {_shown(messages)}", remedy)
    if not messages:
        raise RowFault("no messages", f"'{column}' is an empty list", remedy)
    return [_message(message, f"'{column}' item {index}", remedy) for index, message in enumerate(messages)]


def _message(message: Any, place: str, remedy: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise RowFault("malformed message", f"{place} is a {type(message).__name__}, not an object: {_shown(message)}", remedy)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise RowFault("malformed message", f"{place} has the role {_shown(role)}", remedy)
    if not isinstance(content, str):
        raise RowFault("malformed message", f"{place} has a {type(content).__name__} as content: {_shown(content)}", remedy)
    if not content.strip() and role != "system":
        raise RowFault("empty message", f"{place} (role '{role}') has no text", "fill in the text, or remove the row")
    return {"role": role, "content": content}


def _text(row: Mapping[str, Any], column: str) -> str:
    text = _column(row, column)
    if not isinstance(text, str):
        raise RowFault(f"'{column}' is not text", f"'{column}' is a {type(text).__name__}: {_shown(text)}", f"make '{column}' a string")
    if not text.strip():
        raise RowFault(f"'{column}' is empty", f"'{column}' has no text", "fill in the text, or remove the row")
    return text


def _column(row: Mapping[str, Any], column: str) -> Any:
    if row.get(column) is None:
        found = "is null" if column in row else f"is missing{nearest(column, list(row))}; the row has: {', '.join(row) or 'nothing'}"
        raise RowFault(f"'{column}' is missing", f"column '{column}' {found}", "fill it in, or set data_args to the column that holds it")
    return row[column]


def _shown(value: Any) -> str:
    text = re.sub(r"\s+", " ", repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
