"""The token side of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roll.types import Ints


@dataclass(frozen=True)
class Parsed:
    """What the policy wrote in a turn."""

    message: Mapping[str, Any]
    """Message that `Environment.step` gets: role, content, `tool_calls` with JSON text for arguments, `reasoning_content` if it thought."""
    malformed: Sequence[str] = ()
    """The texts of tool calls that cannot be read."""


class ChatRenderer(Protocol):
    """Messages to tokens and back, in the format of one model."""

    stop_token_ids: frozenset[int]
    """They end a turn: the engine must stop on them."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Ints:
        """The tokens of a whole conversation, with the assistant's turn opened at its end.

        Raises:
            TemplateFault: the format cannot express these messages, or the calls of tools in it cannot be read.
        """
        ...

    def bridge(self, before: Ints, sampled: Ints, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Ints | None:
        """What to lay down after `before` and `sampled`: the end of the turn if `sampled` lacks it, `messages`, the next turn opened.

        Returns:
            None if no safe bridge exists.
        """
        ...

    def parse(self, sampled: Ints, tools: Sequence[Mapping[str, Any]]) -> Parsed:
        """The message that the sampled tokens are."""
        ...

    def text(self, token_ids: Ints) -> str:
        """The tokens as text, special ones included."""
        ...
