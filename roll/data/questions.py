"""The conversation of a prompt for a model that rewards the answer, with names of its pictures. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

from roll.config.schema.model import DataConfig
from roll.data.picture_parts import LABEL, MARK, is_picture
from roll.data.rows import Conversation, parsed_list, prompt_conversation


def named_pictures(row: Mapping[str, Any], data_args: DataConfig, pictures: int = 0) -> Conversation:
    """Return the messages of a prompt, in which `[picture 1]` stands for its first picture, and so on.

    See `marked_pictures` for the arguments and errors.
    """
    numbers = count(1)
    conversation = marked_pictures(row, data_args, pictures)
    return [{**message, "content": _named(message["content"], numbers)} for message in conversation]


def marked_pictures(row: Mapping[str, Any], data_args: DataConfig, pictures: int) -> Conversation:
    """Return the messages of a prompt, in whose texts `MARK` stands for each picture.

    Args:
        row: a row that was checked when it was prepared, with or without the bytes of its pictures.
        pictures: number of pictures of the prompt. They stand before the first message of the user if the row does not
            say where they are.

    Raises:
        RowFault: see `prompt_conversation`.
    """
    marked = dict(row)
    if data_args.messages is not None:
        messages = parsed_list(row.get(data_args.messages))
        marked[data_args.messages] = [*map(_marked, messages)] if isinstance(messages, list) else messages
    conversation = prompt_conversation(marked, data_args)
    if data_args.images is not None:
        conversation = [_relabelled(message) for message in conversation]
    if pictures and not any(MARK in message["content"] for message in conversation):
        first = next((number for number, message in enumerate(conversation) if message["role"] == "user"), 0)
        before = {**conversation[first], "content": MARK * pictures + conversation[first]["content"]}
        conversation = [*conversation[:first], before, *conversation[first + 1 :]]
    return conversation


def _marked(message: Any) -> Any:
    """Return a message with a text part in place of each part that shows a picture."""
    if not isinstance(message, Mapping):
        return message
    contents = {key: message[key] for key in ("content", "value") if isinstance(message.get(key), list)}
    shown = {"type": "text", "text": MARK}
    return {**message, **{key: [shown if is_picture(one) else one for one in parts] for key, parts in contents.items()}}


def _relabelled(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "assistant":
        return message
    return {**message, "content": message["content"].replace(LABEL, MARK)}


def _named(text: str, numbers: count[int]) -> str:
    first, *rest = text.split(MARK)
    return first + "".join(f"[picture {next(numbers)}]{piece}" for piece in rest)
