"""The token side of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roll.types import Ints


@dataclass(frozen=True)
class Parsed:
    """A parsed turn of the policy."""

    message: Mapping[str, Any]
    """Message for `Environment.step`: role, content, `tool_calls` with JSON text for arguments, `reasoning_content` if any."""
    malformed: Sequence[str] = ()
    """Texts of unreadable tool calls."""


class ChatRenderer(Protocol):
    """Converts messages to tokens and back, in the format of one model."""

    stop_token_ids: frozenset[int]
    """Token ids that end a turn. The engine must stop on them."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Ints:
        """Return the tokens of a whole conversation, with an opened assistant's turn at the end.

        Raises:
            TemplateFault: the format cannot express these messages, or the calls of tools in it cannot be read.
        """
        ...

    def bridge(self, before: Ints, sampled: Ints, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Ints | None:
        """Return the tokens after `before` and `sampled`: the end of the turn if `sampled` lacks it, `messages`, and the opened next turn.

        Returns:
            None if no safe bridge exists.
        """
        ...

    def parse(self, sampled: Ints, tools: Sequence[Mapping[str, Any]]) -> Parsed:
        """Parse the sampled tokens."""
        ...

    def text(self, token_ids: Ints) -> str:
        """Return the text of tokens, including special ones."""
        ...
