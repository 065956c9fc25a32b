"""Parses tool calls of the policy in the format of Hermes and Qwen. Pure functions of text.

<tool_call>
{"name": "search", "arguments": {"query": "weather"}}
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.data.native import THINK, THOUGHT

OPEN, CLOSE = "<tool_call>", "</tool_call>"
DECODER = json.JSONDecoder(parse_constant=lambda name: _refuse(name))


@dataclass(frozen=True)
class Written:
    """A parsed turn of the policy."""

    reasoning: str | None
    """Text of the thinking; None without thinking."""
    content: str
    """The remaining text, without the calls."""
    calls: Sequence[Mapping[str, Any]]
    """Tool calls, each with a `name` and with `arguments`, an object."""
    malformed: Sequence[str]
    """Texts of the tool calls that could not be parsed."""


def read_turn(text: str, thinks: bool) -> Written:
    """Return the parts of a turn's text. `thinks`: it begins inside the thinking, which the prompt has opened."""
    reasoning, said = None, text
    if thinks or text.lstrip().startswith(THINK):
        thought, _, said = (text if thinks else text.lstrip().removeprefix(THINK)).partition(THOUGHT)
        reasoning, said = thought.strip("\n"), said.lstrip("\n")
    content, opened, rest = said.partition(OPEN)
    if not opened:
        return Written(reasoning, said, (), ())
    kept = [content.rstrip()]
    calls: list[Mapping[str, Any]] = []
    malformed: list[str] = []
    while opened:
        call, unread, rest = _one_call(rest)
        if call is not None:
            calls.append(call)
        else:
            malformed.append(unread)
        between, opened, rest = rest.partition(OPEN)
        kept.append(between.strip())
    return Written(reasoning, "\n".join(part for part in kept if part), calls, malformed)


def _one_call(text: str) -> tuple[Mapping[str, Any] | None, str, str]:
    """Return the call or None, the text of the call, and the remaining text. `text` begins after an opening tag."""
    try:
        begun = len(text) - len(text.lstrip())
        found, end = DECODER.raw_decode(text, begun)
        after = text[end:].lstrip()
        if after.startswith(CLOSE) and is_call(found):
            return found, text[:end], after.removeprefix(CLOSE)
    except (ValueError, RecursionError):
        pass  # not a call: its text is returned as it is
    ends = [at for at in (text.find(CLOSE), text.find(OPEN)) if at >= 0]
    end = min(ends, default=len(text))
    return None, text[:end].strip(), text[end:].removeprefix(CLOSE)


def is_call(found: Any) -> bool:
    """Whether a JSON value is a tool call: an object with a `name` and object `arguments`, in valid UTF-8."""
    if not (
        isinstance(found, dict)
        and isinstance(found.get("name"), str)
        and found["name"]
        and isinstance(found.get("arguments"), dict)
    ):
        return False
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
