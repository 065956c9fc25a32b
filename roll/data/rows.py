"""Reads the conversation of a row, and raises RowFault if the row cannot be used. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roll.config.schema.model import DataConfig, truths_as_text
from roll.data.json_text import parsed
from roll.data.messages import ROLE_FROM, ROLE_OF, ROLES, UNLEARNT, MessageFault, read_message, unread_message_keys
from roll.data.picture_parts import (
    MARK,
    PICTURES,
    REMEDY,
    PictureFault,
    PictureReference,
    reference_of,
    with_column,
    without_bytes,
)
from roll.errors import FaultCode
from roll.registry import nearest
from roll.types import FP32_MAX

MISSING_REMEDY = "fill it in, or name the right column: in data_args, or for an evaluation with --prompt or --messages"
TEST_CASES, GROUND_TRUTH = "test_cases", "ground_truth"
COLUMNS = {
    *(
        "template",
        "chat_template_kwargs",
        "messages",
        "prompt",
        "response",
        "text",
        "chosen",
        "rejected",
        "margin",
        "label",
        "system",
    ),
    *("tag", "id", "input", "ground_truth", "images"),
}
"""Keys of `data_args` that affect prepared rows."""
PROMPT_COLUMNS = ("input", "context", "history", "system", "image", "images", "video", "videos", "audio", "audios")
"""Columns that other frameworks make a part of the prompt, by their usual names."""
UNNAMED = "have a value in the column '{}', which no key of data_args names, so that the model does not see it"
UNREAD = "have a message with the key '{}', which nothing reads"
UNREAD_MARGIN = (
    "have a value in the column 'margin', which data_args.margin does not name, so that nothing reads it (pipeline: "
    "reward_model reads such a column)"
)
SAYS_NOTHING = "have an undesirable response without text: it teaches no more than not to end the turn at once"
"""Remarks on rows; see `Texts.remarks`."""
JSON_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
LABELS = {"true": True, "1": True, "false": False, "0": False}
"""Labels as text, as in CSV files."""
TOOLS, TEMPLATE_ARGUMENTS = "tools", "chat_template_kwargs"
Conversation = list[dict[str, Any]]


USUAL_REFERENCES = ("reward_model.ground_truth", "answer", "solution", "reference", "label", "target")
"""Where rows of other projects have the reference answer."""


class RowFault(Exception):
    """A row that cannot be used."""

    def __init__(self, reason: str, problem: str, remedy: str, code: FaultCode) -> None:
        super().__init__(problem)
        self.reason = reason
        """A short description without values of the row. The report counts faulty rows by it."""
        self.problem, self.remedy = problem, remedy
        self.code: FaultCode = code


def read_row(row: Mapping[str, Any], data_args: DataConfig, sees: bool = False) -> dict[str, Any]:
    """Return the row with its JSON texts parsed. Some columns of ROLL's files contain such texts.

    Parsed are the column of the messages, `test_cases`, and `ground_truth` if its text is a JSON object. Any other text
    in `ground_truth` is the answer itself. If `data_args.ground_truth` names another column, or a key inside one, its
    value becomes the `ground_truth`.

    Args:
        sees: whether messages may show pictures; if so, a text of them is only parsed.

    Raises:
        RowFault: the text of `test_cases` is not JSON, the text of the messages is not a JSON list of messages, or the
            row has no value where `data_args.ground_truth` says.
    """
    done = dict(row)
    if data_args.ground_truth is not None:
        done[GROUND_TRUTH] = reference_at(row, data_args.ground_truth)
    if isinstance(done.get(TEST_CASES), str) and done[TEST_CASES].strip():
        done[TEST_CASES] = _from_json(done[TEST_CASES], TEST_CASES)
    if data_args.messages is not None and isinstance(row.get(data_args.messages), str):
        text = row[data_args.messages]
        done[data_args.messages] = _from_json(text, data_args.messages) if sees else _messages(row, data_args.messages)
    truth = done.get(GROUND_TRUTH)
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        done[GROUND_TRUTH] = _object_or_text(truth)
    return done


def only_given(read: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that was read which its file has: `read_row` may have added `ground_truth`."""
    return {name: value for name, value in read.items() if name in row}


def reference_at(row: Mapping[str, Any], path: str) -> Any:
    """Return the reference answer at a path; see `value_at`.

    Raises:
        RowFault: there is none, or it is an empty text in whose place rewards would take the row's `answer`.
    """
    remedy = "fill it in, or name the column of the reference answer, or keys to it, in data_args.ground_truth"
    found = value_at(row, path, f"data_args.ground_truth is '{path}'", remedy)
    if found == "" and row.get("answer") is not None:
        problem = f"data_args.ground_truth is '{path}', which is empty, and rewards would read 'answer' instead"
        raise RowFault(f"'{path}' is empty", problem, remedy, "empty")
    return found


def other_reference(row: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the path and the value of what may be the reference answer of a row without a `ground_truth`."""
    for path in USUAL_REFERENCES if row.get(GROUND_TRUTH) in (None, "") else ():
        try:
            return path, value_at(row, path, "", "")
        except RowFault:
            continue
    return None


def value_at(row: Mapping[str, Any], path: str, named: str, remedy: str) -> Any:
    """Return the value at a path: the name of a column, or keys joined with dots that reach into one, whose texts may
    be JSON.

    Args:
        row: the row.
        path: `column`, or `column.key`.
        named: what names the path, for the message.
        remedy: the remedy if there is no value.

    Raises:
        RowFault: there is no value.
    """
    if row.get(path) is not None:
        return row[path]
    found: Any = row
    for number, key in enumerate(keys := path.split("."), start=1):
        if isinstance(found, str):
            found = _object_or_text(found)
        if not isinstance(found, Mapping) or found.get(key) is None:
            inside, names = ".".join(keys[: number - 1]), list(found) if isinstance(found, Mapping) else []
            missing = f"'{key}' is null" if key in names else f"'{key}' is missing{nearest(key, names)}"
            holder = f"'{inside}'" if inside else "the row"
            is_object = isinstance(found, Mapping)
            has = (
                f"{holder} has: {', '.join(map(str, names)) or 'no keys'}"
                if is_object
                else f"{holder} is {_excerpt(found)}"
            )
            raise RowFault(f"no '{path}'", f"{named}, but {missing}; {has}", remedy, "missing")
        found = found[key]
    return found


def _has_value(row: Mapping[str, Any], path: str) -> bool:
    """Return whether a row has a column of this name, or a value at this path."""
    try:
        return path in row or value_at(row, path, "", "") is not None
    except RowFault:
        return False


def template_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's arguments for the chat template: `tools`, and the keys of `chat_template_kwargs`. JSON texts are
    parsed.

    Raises:
        RowFault: `tools` is not a list of objects, `chat_template_kwargs` is not an object, a text in them is not JSON,
            or a truth value is a text.
    """
    tools, others = (_optional(row, column) for column in (TOOLS, TEMPLATE_ARGUMENTS))
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        remedy = f"make '{TOOLS}' a list of objects, the JSON schemas of functions"
        raise RowFault(f"'{TOOLS}' is not a list of objects", f"'{TOOLS}' is {_excerpt(tools)}", remedy, "wrong_type")
    if others and not isinstance(others, dict):
        remedy = f"make '{TEMPLATE_ARGUMENTS}' an object such as {{\"enable_thinking\": false}}"
        raise RowFault(
            f"'{TEMPLATE_ARGUMENTS}' is not an object",
            f"'{TEMPLATE_ARGUMENTS}' is {_excerpt(others)}",
            remedy,
            "wrong_type",
        )
    for key in truths_as_text(others or {}):
        problem = f"'{TEMPLATE_ARGUMENTS}' has '{key}' as the text {others[key]!r}, which templates take as true"
        raise RowFault(
            f"'{key}' of '{TEMPLATE_ARGUMENTS}' is a text", problem, "write true or false without quotes", "wrong_type"
        )
    return {**(others or {}), **({TOOLS: tools} if tools else {})}


def prompt_conversation(row: Mapping[str, Any], data_args: DataConfig, sees: bool = False) -> Conversation:
    """Return the messages that the policy should answer.

    Args:
        sees: whether the model sees pictures; see `read_message`. All are then in place.

    Raises:
        RowFault: a column is missing, empty or of the wrong type, or the last message is not one that the policy can
            answer; or there are more or fewer pictures than places for them.
    """
    conversation = _asked(row, data_args, sees)
    return _with_pictures(conversation, row, data_args) if sees else conversation


def _asked(row: Mapping[str, Any], data_args: DataConfig, sees: bool) -> Conversation:
    """Return the messages of a prompt. The pictures of `data_args.images` are not in place yet."""
    if data_args.messages is None:
        return _prompt(row, data_args)
    conversation = _messages(row, data_args.messages, sees=sees)
    if conversation[-1]["role"] not in ("user", "tool"):
        problem = f"'{data_args.messages}' ends with a message of the role '{conversation[-1]['role']}'"
        remedy = "end the list with the user's message that the policy should answer"
        if data_args.response is not None:
            remedy += ", or remove data_args.response if the list has the response to learn"
        raise RowFault("messages end with the wrong role", problem, remedy, "not_allowed")
    return conversation


def example_conversation(
    row: Mapping[str, Any], data_args: DataConfig, sees: bool = False, may_be_empty: bool = False
) -> Conversation:
    """Return the messages of an SFT example. The last message is the assistant's, which is learnt.

    With a column of responses, earlier messages of the assistant are a part of the prompt, and are not learnt.

    Args:
        sees: whether the model sees pictures; see `read_message`. All are then in place.
        may_be_empty: whether the last message may have no text.

    Raises:
        RowFault: a column is missing, empty or of the wrong type, the last message is not the assistant's, or it is the
            only one; or there are more or fewer pictures than places for them.
    """
    if data_args.response is None:
        conversation = _whole(row, data_args, sees, may_be_empty)
    else:
        prompt = map(_unlearnt, _asked(row, data_args, sees))
        conversation = [*prompt, _answer(row, data_args.response, sees, may_be_empty)]
    return _with_pictures(conversation, row, data_args) if sees else conversation


def _unlearnt(message: dict[str, Any]) -> dict[str, Any]:
    return message | {UNLEARNT: False} if message["role"] == "assistant" else message


def _whole(row: Mapping[str, Any], data_args: DataConfig, sees: bool, may_be_empty: bool) -> Conversation:
    """Return the messages of an example whose response is among them. The pictures of `data_args.images` are not in
    place yet.
    """
    assert data_args.messages is not None, "the configuration was checked"
    conversation = _messages(row, data_args.messages, may_be_empty, sees)
    if conversation[-1]["role"] != "assistant":
        problem = f"'{data_args.messages}' ends with a message of the role '{conversation[-1]['role']}'"
        raise RowFault(
            "messages end with the wrong role",
            problem,
            "end the list with the assistant's message to be learnt, or name the column that has it in "
            "data_args.response",
            "not_allowed",
        )
    if len(conversation) == 1:
        raise RowFault(
            "messages without a prompt",
            f"'{data_args.messages}' holds only the response",
            "put the user's message before it",
            "missing",
        )
    return conversation


def _with_pictures(conversation: Conversation, row: Mapping[str, Any], data_args: DataConfig) -> Conversation:
    """Return a conversation with the pictures of `data_args.images` in place. Raises RowFault if they do not fit."""
    if any(message["content"].count(MARK) != len(message.get(PICTURES, ())) for message in conversation):
        problem = f"a text has the character U+{ord(MARK):04X}, which Unicode reserves for internal use"
        raise RowFault("a reserved character", problem, "remove it from the text", "not_allowed")
    given = column_pictures(row, data_args.images) if data_args.images else []
    try:
        return with_column(conversation, given, has_labels=data_args.images is not None)
    except PictureFault as fault:
        raise RowFault("pictures do not fit their places", f"its messages {fault}", fault.remedy, fault.code) from fault


def column_pictures(row: Mapping[str, Any], column: str) -> list[PictureReference]:
    """Return the pictures in a column: one or a list of them, or none if it is empty or the row does not have it.

    Raises:
        RowFault: an element is no picture that can be read.
    """
    value = row.get(column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _from_json(value, column)
    elements = value if isinstance(value, list) else [] if value in (None, "") else [value]
    found = []
    for number, element in enumerate(elements):
        place = f"'{column}' item {number}" if isinstance(value, list) else f"'{column}'"
        try:
            reference = reference_of(element)
        except PictureFault as fault:
            raise RowFault("unreadable picture", f"{place} {fault}", fault.remedy, fault.code) from fault
        if reference is None:
            raise RowFault("unreadable picture", f"{place} is {_excerpt(element)}", REMEDY, "missing")
        found.append(reference)
    return found


def without_pictures(row: Mapping[str, Any], data_args: DataConfig) -> dict[str, Any]:
    """Return a row without the bytes of its pictures, for rewards and reports. Paths stay."""
    shown = [name for name in (data_args.messages, data_args.images) if name is not None and name in row]
    return {**row, **{name: without_bytes(parsed_list(row[name])) for name in shown}}


def parsed_list(value: Any) -> Any:
    """Return the list in a column that holds the JSON text of one, or else its value."""
    return _parsed_or_none(value) or value if isinstance(value, str) and value.lstrip().startswith("[") else value


def pair_conversations(
    row: Mapping[str, Any], data_args: DataConfig, sees: bool = False
) -> tuple[Conversation, Conversation]:
    """Return two conversations with the same prompt: one with the chosen response, and one with the rejected response.

    With a column for the prompt, each response is a text, or a list with one message of the assistant. Without such a
    column, both columns of responses hold whole conversations that differ only in their last message, the assistant's.
    The rejected response may be empty.

    Args:
        sees: whether the model sees pictures; see `read_message`. All are then in place, the same ones in both.

    Raises:
        RowFault: see `prompt_conversation`; or a response is invalid.
    """
    chosen, rejected = _pair(row, data_args, sees)
    if not sees:
        return chosen, rejected
    return _with_pictures(chosen, row, data_args), _with_pictures(rejected, row, data_args)


def _pair(row: Mapping[str, Any], data_args: DataConfig, sees: bool) -> tuple[Conversation, Conversation]:
    """Return the two conversations of a pair. The pictures of `data_args.images` are not in place yet."""
    assert data_args.chosen is not None and data_args.rejected is not None, "the configuration was checked"
    columns = (data_args.chosen, data_args.rejected)
    if data_args.prompt is not None or data_args.messages is not None:
        prompt = _asked(row, data_args, sees)
        better, worse = (_answer(row, name, sees, may_be_empty=name == columns[1]) for name in columns)
        return [*prompt, better], [*prompt, worse]
    chosen, rejected = (_messages(row, column, may_be_empty=True, sees=sees) for column in columns)
    if chosen[:-1] != rejected[:-1]:
        problem = f"'{columns[0]}' and '{columns[1]}' differ in more than their last message"
        raise RowFault(
            "a pair with two prompts",
            problem,
            "make both begin with the same conversation, or put it into its own column",
            "contradiction",
        )
    for column, conversation in zip(columns, (chosen, rejected), strict=True):
        if len(conversation) == 1 or conversation[-1]["role"] != "assistant":
            problem = f"'{column}' is not a conversation that ends with the assistant's message"
            raise RowFault(
                "a pair without a prompt",
                problem,
                "give the whole conversation, or name the column of the prompt in data_args",
                "missing",
            )
    _check_said(chosen[-1], columns[0])
    return chosen, rejected


def labelled_conversation(
    row: Mapping[str, Any], data_args: DataConfig, sees: bool = False
) -> tuple[Conversation, bool]:
    """Return a conversation that ends with the assistant's message, and whether that message is desirable. One that is
    not may be empty.

    Args:
        sees: whether the model sees pictures; see `read_message`. All are then in place.

    Raises:
        RowFault: see `example_conversation`; or the label is neither true nor false.
    """
    assert data_args.label is not None, "the configuration was checked"
    label = _column(row, data_args.label)
    label = LABELS.get(label.strip().lower(), label) if isinstance(label, str) else label
    if label not in (True, False):
        problem = f"'{data_args.label}' is {_excerpt(label)}"
        raise RowFault(
            f"'{data_args.label}' is not a label",
            problem,
            "make it true (desirable) or false, or 1 or 0",
            "not_allowed",
        )
    return example_conversation(row, data_args, sees, may_be_empty=not label), bool(label)


def column_number(row: Mapping[str, Any], column: str) -> float:
    """Return the number in a column. Raises RowFault if it is missing, not a number, or outside the range of fp32."""
    value = _column(row, column)
    value = float(value) if isinstance(value, str) and JSON_NUMBER.fullmatch(value.strip()) else value
    # A number that fp32 cannot hold would become infinite in the loss.
    if isinstance(value, bool) or not isinstance(value, int | float) or not -FP32_MAX <= value <= FP32_MAX:
        raise RowFault(
            f"'{column}' is not a number",
            f"'{column}' is {_excerpt(value)}",
            f"make '{column}' a number that fp32 can hold",
            "wrong_type",
        )
    return float(value)


def _answer(row: Mapping[str, Any], column: str, sees: bool, may_be_empty: bool) -> dict[str, Any]:
    """Return the assistant's message in a column. The column holds a text, or a list with that one message.

    The list may be JSON text, as in CSV.
    """
    value = _column(row, column)
    if not isinstance(value, str | list):
        problem = f"'{column}' is a {type(value).__name__}: {_excerpt(value)}"
        remedy = f"make '{column}' a string, or a list with one message of the assistant"
        raise RowFault(f"'{column}' is not text", problem, remedy, "wrong_type")
    if isinstance(value, str) and not _holds_messages(value):
        answer = {"role": "assistant", "content": value}
    else:
        messages = _messages(row, column, may_be_empty=True, sees=sees)
        if len(messages) != 1 or messages[0]["role"] != "assistant":
            problem = f"'{column}' holds {len(messages)} messages, the last of the role '{messages[-1]['role']}'"
            remedy = "make it a text, or one message of the assistant; name no column of prompts if it holds whole "
            remedy += "conversations"
            raise RowFault("response is not one message of the assistant", problem, remedy, "not_allowed")
        answer = messages[0]
    if not may_be_empty:
        _check_said(answer, column)
    return answer


def says_nothing(message: Mapping[str, Any]) -> bool:
    """Return whether a message has neither text nor tool calls."""
    return not message["content"].strip() and not message.get("tool_calls")


def _check_said(message: Mapping[str, Any], column: str) -> None:
    if says_nothing(message):
        problem = f"'{column}' has no text of the assistant"
        raise RowFault(f"'{column}' is empty", problem, "fill in the text, or remove the row", "empty")


def _prompt(row: Mapping[str, Any], data_args: DataConfig) -> Conversation:
    assert data_args.prompt is not None, "the configuration was checked"
    if data_args.system is not None and _has_value(row, data_args.system):
        problem = (
            f"data_args.system is '{data_args.system}', the text of a system message, and also the name of a column"
        )
        remedy = "write the text itself there, or remove the key; rows with system messages of their own have them in "
        remedy += "the list of data_args.messages"
        raise RowFault("data_args.system names a column", problem, remedy, "contradiction")
    question = {"role": "user", "content": _question(row, data_args.prompt, data_args.input)}
    return [{"role": "system", "content": data_args.system}, question] if data_args.system else [question]


def _question(row: Mapping[str, Any], prompt: str, further: str | None) -> str:
    text = row.get(further) if further else None
    if text is not None and not isinstance(text, str):
        problem = f"'{further}' is a {type(text).__name__}: {_excerpt(text)}"
        raise RowFault(
            f"'{further}' is not text", problem, f"make '{further}' a string, which may be empty", "wrong_type"
        )
    said = _quoted_value(row, prompt)
    return f"{said}\n{text}" if text and text.strip() else said


def _messages(row: Mapping[str, Any], column: str, may_be_empty: bool = False, sees: bool = False) -> Conversation:
    """Return the messages in a column. `may_be_empty` allows an assistant's turn that ends at once, and `sees`
    pictures.
    """
    messages = _column(row, column)
    if isinstance(messages, str):
        messages = _from_json(messages, column)
    remedy = f"make '{column}' a list of objects with a `role` ({', '.join(ROLES)}) and a text as `content`"
    if not isinstance(messages, list):
        raise RowFault(
            "messages are not a list",
            f"'{column}' is a {type(messages).__name__}: {_excerpt(messages)}",
            remedy,
            "wrong_type",
        )
    if not messages:
        raise RowFault("no messages", f"'{column}' is an empty list", remedy, "empty")
    return [
        _message(message, f"'{column}' item {index}", remedy, may_be_empty, sees)
        for index, message in enumerate(messages)
    ]


def _message(message: Any, place: str, remedy: str, may_be_empty: bool, sees: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowFault(
            "malformed message",
            f"{place} is a {type(message).__name__}, not an object: {_excerpt(message)}",
            remedy,
            "wrong_type",
        )
    try:
        read = read_message(message, sees)
    except MessageFault as fault:
        raise RowFault(fault.reason, f"{place} {fault}", fault.remedy or remedy, fault.code) from fault
    role = read["role"]
    if "tool_calls" in read:
        return read
    if message.get("content") is None and message.get("value") is None:
        raise RowFault("malformed message", f"{place} has a NoneType as content: None", remedy, "missing")
    if not read["content"].strip() and role != "system" and not (may_be_empty and role == "assistant"):
        raise RowFault(
            "empty message", f"{place} (role '{role}') has no text", "fill in the text, or remove the row", "empty"
        )
    return read


def remarks_of(row: Mapping[str, Any], data_args: DataConfig) -> tuple[str, ...]:
    """Return what a user should know about a row that can be read: what nothing reads. See `Texts.remarks`.

    These are keys of its messages, and columns that other frameworks put into the prompt.
    """
    named = {
        data_args.prompt,
        data_args.input,
        data_args.messages,
        data_args.response,
        data_args.text,
        data_args.id,
        data_args.tag,
        data_args.images,
    }
    columns = [name for name in PROMPT_COLUMNS if name not in named and row.get(name) not in (None, "", [], {})]
    found = {UNNAMED.format(name): None for name in columns}
    if data_args.chosen and not data_args.margin and row.get("margin") not in (None, ""):
        found[UNREAD_MARGIN] = None
    for column in filter(None, (data_args.messages, data_args.chosen, data_args.rejected, data_args.response)):
        messages = row.get(column)
        if isinstance(messages, str):
            messages = _parsed_or_none(messages) if _holds_messages(messages) else None
        for message in messages if isinstance(messages, list) else ():
            found |= {UNREAD.format(key): None for key in unread_message_keys(message)}
    return tuple(found)


def _from_json(text: str, column: str) -> Any:
    """Return the value of a column's JSON text. Raises RowFault if the text is not JSON."""
    try:
        return parsed(text)
    except (ValueError, RecursionError) as error:
        what = "an object" if column == TEMPLATE_ARGUMENTS else "a list"
        remedy = f"make '{column}' {what}, or the JSON text of one"
        raise RowFault(
            f"'{column}' is not JSON",
            f"'{column}' is text that is not JSON ({error}): {_excerpt(text)}",
            remedy,
            "malformed",
        ) from error


def _object_or_text(text: str) -> dict[str, Any] | str:
    """Return the object if the text is a JSON object with keys, or else the text: `{1, 2}` is a set."""
    found = _parsed_or_none(text)
    return found if isinstance(found, dict) and found else text


def _parsed_or_none(text: str) -> Any:
    try:
        return parsed(text)
    except (ValueError, RecursionError):
        return None


def _optional(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, parsed if it is JSON text; None if it is missing or empty."""
    value = row.get(column)
    if isinstance(value, str):
        return _from_json(value, column) if value.strip() else None
    return value


def column_text(row: Mapping[str, Any], column: str) -> str:
    """Return the text in a column. Raises RowFault if it is missing, not a text, or blank."""
    text = _column(row, column)
    if not isinstance(text, str):
        is_messages = isinstance(text, list) and all(isinstance(one, dict) for one in text)
        remedy = (
            f"it holds messages: set data_args.messages={column} instead of the key that names it"
            if is_messages and text
            else f"make '{column}' a string"
        )
        raise RowFault(
            f"'{column}' is not text", f"'{column}' is a {type(text).__name__}: {_excerpt(text)}", remedy, "wrong_type"
        )
    if not text.strip():
        raise RowFault(
            f"'{column}' is empty", f"'{column}' has no text", "fill in the text, or remove the row", "empty"
        )
    return text


def _quoted_value(row: Mapping[str, Any], column: str) -> str:
    """Return a single message's text. Raises RowFault as `text_of` does, and for a JSON list of messages."""
    text = column_text(row, column)
    if _holds_messages(text):
        problem = f"'{column}' is the JSON text of messages, which would be read as they are written: {_excerpt(text)}"
        raise RowFault(
            f"'{column}' is not text",
            problem,
            f"it holds messages: set data_args.messages={column} instead of the key that names it",
            "wrong_type",
        )
    return text


def _holds_messages(text: str) -> bool:
    found = _parsed_or_none(text) if text.lstrip().startswith("[") else None
    return isinstance(found, list) and bool(found) and all(_is_message(one) for one in found)


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    role, teller = value.get("role"), value.get("from")
    return (isinstance(role, str) and role in ROLE_OF) or (isinstance(teller, str) and teller in ROLE_FROM)


def _column(row: Mapping[str, Any], column: str) -> Any:
    if column not in row and column.partition(".")[0] in row:
        return value_at(row, column, f"the column is '{column}'", MISSING_REMEDY)
    if row.get(column) is None:
        found = (
            "is null"
            if column in row
            else f"is missing{nearest(column, list(row))}; the row has: {', '.join(row) or 'nothing'}"
        )
        raise RowFault(f"'{column}' is missing", f"column '{column}' {found}", MISSING_REMEDY, "missing")
    return row[column]


def _excerpt(value: Any) -> str:
    text = re.sub(r"\s+", " ", repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
