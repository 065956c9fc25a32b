"""Reads the conversation of a row, and raises RowFault if the row cannot be used. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from roll.config.schema.model import DataConfig
from roll.data.json_text import parsed
from roll.data.native import MORE, UNLEARNT
from roll.registry import nearest
from roll.types import FP32_MAX

ROLES = ("system", "user", "assistant", "tool")
MISSING_REMEDY = "fill it in, or name the right column: in data_args, or for an evaluation with --prompt or --messages"
TEST_CASES, GROUND_TRUTH = "test_cases", "ground_truth"
TOOLS, TEMPLATE_ARGUMENTS = "tools", "chat_template_kwargs"
Conversation = list[dict[str, Any]]


class RowFault(Exception):
    """A row that cannot be used."""

    def __init__(self, reason: str, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.reason = reason
        """A short description without values of the row. The report counts faulty rows by it."""
        self.problem, self.remedy = problem, remedy


def read_row(row: Mapping[str, Any], data_args: DataConfig) -> dict[str, Any]:
    """Return the row with its JSON texts parsed. Some columns of ROLL's files contain such texts.

    Parsed are the column of the messages, `test_cases`, and `ground_truth` if its text is a JSON object. Any other text in `ground_truth`
    is the answer itself.

    Raises:
        RowFault: the text of `test_cases` is not JSON, or the text of the messages is not a JSON list of messages.
    """
    done = dict(row)
    if isinstance(done.get(TEST_CASES), str) and done[TEST_CASES].strip():
        done[TEST_CASES] = _from_json(done[TEST_CASES], TEST_CASES)
    if data_args.messages is not None and isinstance(row.get(data_args.messages), str):
        done[data_args.messages] = _messages(row, data_args.messages)
    truth = done.get(GROUND_TRUTH)
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        done[GROUND_TRUTH] = _object_or_text(truth)
    return done


def template_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's arguments for the chat template: `tools`, and the keys of `chat_template_kwargs`. JSON texts are parsed.

    Raises:
        RowFault: `tools` is not a list of objects, `chat_template_kwargs` is not an object, or a text in them is not JSON.
    """
    tools, others = (_optional(row, column) for column in (TOOLS, TEMPLATE_ARGUMENTS))
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        remedy = f"make '{TOOLS}' a list of objects, the JSON schemas of functions"
        raise RowFault(f"'{TOOLS}' is not a list of objects", f"'{TOOLS}' is {_shown(tools)}", remedy)
    if others and not isinstance(others, dict):
        remedy = f"make '{TEMPLATE_ARGUMENTS}' an object such as {{\"enable_thinking\": false}}"
        raise RowFault(f"'{TEMPLATE_ARGUMENTS}' is not an object", f"'{TEMPLATE_ARGUMENTS}' is {_shown(others)}", remedy)
    # Arrow gives each row the keys of all rows; keys that a row lacks are null.
    given = {key: value for key, value in (others or {}).items() if value is not None}
    return {**given, **({TOOLS: tools} if tools else {})}


def prompt_conversation(row: Mapping[str, Any], data_args: DataConfig) -> Conversation:
    """Return the messages that the policy should answer.

    Raises:
        RowFault: a column is missing, empty or of the wrong type, or the last message is not one that the policy can answer.
    """
    if data_args.messages is None:
        return _prompt(row, data_args)
    conversation = _messages(row, data_args.messages)
    if conversation[-1]["role"] not in ("user", "tool"):
        problem = f"'{data_args.messages}' ends with a message of the role '{conversation[-1]['role']}'"
        raise RowFault("messages end with the wrong role", problem, "end the list with the user's message that the policy should answer")
    return conversation


def example_conversation(row: Mapping[str, Any], data_args: DataConfig) -> Conversation:
    """Return the messages of an SFT example. The last message is the assistant's, which is learnt.

    Raises:
        RowFault: a column is missing, empty or of the wrong type, the last message is not the assistant's, or it is the only one.
    """
    if data_args.messages is None:
        assert data_args.response is not None, "the configuration was checked"
        return [*_prompt(row, data_args), {"role": "assistant", "content": text_of(row, data_args.response)}]
    conversation = _messages(row, data_args.messages)
    if conversation[-1]["role"] != "assistant":
        problem = f"'{data_args.messages}' ends with a message of the role '{conversation[-1]['role']}'"
        raise RowFault("messages end with the wrong role", problem, "end the list with the assistant's message to be learnt")
    if len(conversation) == 1:
        raise RowFault("messages without a prompt", f"'{data_args.messages}' holds only the response", "put the user's message before it")
    return conversation


def pair_conversations(row: Mapping[str, Any], data_args: DataConfig) -> tuple[Conversation, Conversation]:
    """Return two conversations with the same prompt: one with the chosen response, and one with the rejected response.

    With a column for the prompt, each response is a text, or a list with one message of the assistant. Without such a column, both
    columns of responses hold whole conversations that differ only in their last message, the assistant's.

    Raises:
        RowFault: see `prompt_conversation`; or a response is invalid.
    """
    assert data_args.chosen is not None and data_args.rejected is not None, "the configuration was checked"
    columns = (data_args.chosen, data_args.rejected)
    if data_args.prompt is not None or data_args.messages is not None:
        prompt = prompt_conversation(row, data_args)
        chosen, rejected = ([*prompt, _answer(row, column)] for column in columns)
        return chosen, rejected
    chosen, rejected = (_messages(row, column, may_be_empty=True) for column in columns)
    if chosen[:-1] != rejected[:-1]:
        problem = f"'{columns[0]}' and '{columns[1]}' differ in more than their last message"
        raise RowFault("a pair with two prompts", problem, "make both begin with the same conversation, or put it into its own column")
    for column, conversation in zip(columns, (chosen, rejected), strict=True):
        if len(conversation) == 1 or conversation[-1]["role"] != "assistant":
            problem = f"'{column}' is not a conversation that ends with the assistant's message"
            raise RowFault("a pair without a prompt", problem, "give the whole conversation, or name the column of the prompt in data_args")
    return chosen, rejected


def labelled_conversation(row: Mapping[str, Any], data_args: DataConfig) -> tuple[Conversation, bool]:
    """Return a conversation that ends with the assistant's message, and whether that message is desirable.

    Raises:
        RowFault: see `example_conversation`; or the label is neither true nor false.
    """
    assert data_args.label is not None, "the configuration was checked"
    label = _column(row, data_args.label)
    if label not in (True, False):
        problem = f"'{data_args.label}' is {_shown(label)}"
        raise RowFault(f"'{data_args.label}' is not a label", problem, "make it true (desirable) or false, or 1 or 0")
    if data_args.response is None:
        return example_conversation(row, data_args), bool(label)
    return [*prompt_conversation(row, data_args), _answer(row, data_args.response)], bool(label)


def number(row: Mapping[str, Any], column: str) -> float:
    """Return the number in a column. Raises RowFault if it is missing, not a number, or outside the range of fp32."""
    value = _column(row, column)
    # A number that fp32 cannot hold would become infinite in the loss.
    if isinstance(value, bool) or not isinstance(value, int | float) or not -FP32_MAX <= value <= FP32_MAX:
        raise RowFault(f"'{column}' is not a number", f"'{column}' is {_shown(value)}", f"make '{column}' a number that fp32 can hold")
    return float(value)


def _answer(row: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Return the assistant's message in a column. The column holds a text, which may be empty, or a list with that one message."""
    value = _column(row, column)
    if isinstance(value, str):
        return {"role": "assistant", "content": value}
    messages = _messages(row, column, may_be_empty=True)
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        problem = f"'{column}' holds {len(messages)} messages, the last of the role '{messages[-1]['role']}'"
        remedy = "make it a text, or a list with one message of the assistant; for pairs of conversations, set no column for the prompt"
        raise RowFault("response is not one message of the assistant", problem, remedy)
    return messages[0]


def _prompt(row: Mapping[str, Any], data_args: DataConfig) -> Conversation:
    assert data_args.prompt is not None, "the configuration was checked"
    question = {"role": "user", "content": text_of(row, data_args.prompt)}
    return [{"role": "system", "content": data_args.system}, question] if data_args.system else [question]


def _messages(row: Mapping[str, Any], column: str, may_be_empty: bool = False) -> Conversation:
    """Return the messages in a column. `may_be_empty` allows a message of the assistant without text: a turn that ends at once."""
    messages = _column(row, column)
    if isinstance(messages, str):
        messages = _from_json(messages, column)
    remedy = f"make '{column}' a list of objects with a `role` ({', '.join(ROLES)}) and a text as `content`"
    if not isinstance(messages, list):
        raise RowFault("messages are not a list", f"'{column}' is a {type(messages).__name__}: {_shown(messages)}", remedy)
    if not messages:
        raise RowFault("no messages", f"'{column}' is an empty list", remedy)
    return [_message(message, f"'{column}' item {index}", remedy, may_be_empty) for index, message in enumerate(messages)]


def _message(message: Any, place: str, remedy: str, may_be_empty: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowFault("malformed message", f"{place} is a {type(message).__name__}, not an object: {_shown(message)}", remedy)
    role, content = message.get("role"), message.get("content")
    more = {key: message[key] for key in MORE if message.get(key)}
    if role == "assistant" and message.get(UNLEARNT) is False:
        more[UNLEARNT] = False
    if "tool_calls" in more:
        content, may_be_empty = "" if content is None else content, True
    if role not in ROLES:
        raise RowFault("malformed message", f"{place} has the role {_shown(role)}", remedy)
    if isinstance(content, list) and (seen := _pictures(content)):
        problem = f"{place} has a part of the type '{seen[0]}': training on images and video is not supported"
        raise RowFault("images or video", problem, "remove such rows, or describe the images in words")
    if not isinstance(content, str):
        raise RowFault("malformed message", f"{place} has a {type(content).__name__} as content: {_shown(content)}", remedy)
    if not content.strip() and role != "system" and not (may_be_empty and role == "assistant"):
        raise RowFault("empty message", f"{place} (role '{role}') has no text", "fill in the text, or remove the row")
    return {"role": role, "content": content, **more}


def _pictures(parts: Sequence[Any]) -> list[str]:
    """Return the types of all parts of a message that are images or video."""
    types = [str(part.get("type")) for part in parts if isinstance(part, dict)]
    return [kind for kind in types if kind.startswith(("image", "video"))]


def _from_json(text: str, column: str) -> Any:
    """Return the value of a column's JSON text. Raises RowFault if the text is not JSON."""
    try:
        return parsed(text)
    except (ValueError, RecursionError) as error:
        remedy = f"make '{column}' a list, or the JSON text of a list"
        raise RowFault(f"'{column}' is not JSON", f"'{column}' is text that is not JSON ({error}): {_shown(text)}", remedy) from error


def _object_or_text(text: str) -> dict[str, Any] | str:
    """Return the object if the text is a JSON object with keys, or else the text. `{}` and `{1, 2}` are answers: sets in mathematics."""
    try:
        found = parsed(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) and found else text


def _optional(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, parsed if it is JSON text; None if it is missing or empty."""
    value = row.get(column)
    if isinstance(value, str):
        return _from_json(value, column) if value.strip() else None
    return value


def text_of(row: Mapping[str, Any], column: str) -> str:
    """Return the text in a column. Raises RowFault if it is missing, not a text, or blank."""
    text = _column(row, column)
    if not isinstance(text, str):
        raise RowFault(f"'{column}' is not text", f"'{column}' is a {type(text).__name__}: {_shown(text)}", f"make '{column}' a string")
    if not text.strip():
        raise RowFault(f"'{column}' is empty", f"'{column}' has no text", "fill in the text, or remove the row")
    return text


def _column(row: Mapping[str, Any], column: str) -> Any:
    if row.get(column) is None:
        found = "is null" if column in row else f"is missing{nearest(column, list(row))}; the row has: {', '.join(row) or 'nothing'}"
        raise RowFault(f"'{column}' is missing", f"column '{column}' {found}", MISSING_REMEDY)
    return row[column]


def _shown(value: Any) -> str:
    text = re.sub(r"\s+", " ", repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
