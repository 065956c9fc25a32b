"""Parses JSON without losing values: a repeated key is rejected, where `json` would keep the last value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

SPACE = re.compile(r"[ \t\n\r]*")


class RepeatedKey(ValueError):
    """An object has the same key more than once."""


class NotText(ValueError):
    """A value has characters that are not text, such as half of a surrogate pair."""


def parsed(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or an object repeats a key (RepeatedKey), or it holds half of a surrogate pair
            (NotText).
        RecursionError: the text is nested too deeply.
    """
    found = _ONCE.decode(text)
    if "\\ud" in text.lower():
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise NotText(f"holds a value that JSON cannot express: {error}") from error
    return found


def items(text: str) -> Iterator[Any]:
    """Yield the items of a JSON array. In place of an item with a repeated key, yield the RepeatedKey exception.

    Raises:
        ValueError: the text is not an array, or is truncated.
        RecursionError: the text is nested too deeply.
    """
    at = _behind_space(text, 0)
    if text[at : at + 1] != "[":
        raise json.JSONDecodeError("Expecting '['", text, at)
    at = _behind_space(text, at + 1)
    while text[at : at + 1] != "]":
        item, at = _item(text, at)
        yield item
        at = _behind_space(text, at)
        if text[at : at + 1] == ",":
            at = _behind_space(text, at + 1)
            if text[at : at + 1] == "]":
                raise json.JSONDecodeError("Illegal trailing comma before end of array", text, at)
        elif text[at : at + 1] != "]":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    if (end := _behind_space(text, at + 1)) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)


def _item(text: str, begin: int) -> tuple[Any, int]:
    try:
        return _ONCE.raw_decode(text, begin)
    except RepeatedKey as error:
        return error, _PLAIN.raw_decode(text, begin)[1]


def _behind_space(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    return found.end() if found else at


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedKey(
            f"has the key {next(name for name in names if names.count(name) > 1)!r} more than once in one object"
        )
    return found


_ONCE, _PLAIN = json.JSONDecoder(object_pairs_hook=_object), json.JSONDecoder()
