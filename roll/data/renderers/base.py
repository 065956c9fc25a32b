"""Protocol of renderers, which convert conversations to tokens and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roll.types import Ints


@dataclass(frozen=True)
class Parsed:
    """A parsed turn of the policy."""

    message: Mapping[str, Any]
    """Message for `Environment.step`: role, content, `tool_calls` (arguments as JSON text), any `reasoning_content`."""
    malformed: Sequence[str] = ()
    """Texts of the tool calls that could not be parsed."""


class ChatRenderer(Protocol):
    """Converts messages to tokens and back, in the format of one model."""

    stop_token_ids: frozenset[int]
    """Token ids that end a turn. The engine must stop on them."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Ints:
        """Return the tokens of a whole conversation, with an assistant turn opened at the end.

        Raises:
            TemplateFault: the format cannot express the messages, or `tools` are given although tool calls in this
                format cannot be parsed.
        """
        ...

    def bridge(
        self, before: Ints, sampled: Ints, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> Ints | None:
        """Return the tokens that continue `before` and `sampled`; None if there is no safe continuation.

        They consist of the end of the sampled turn (if `sampled` lacks it), the `messages`, and the start of the next
        assistant turn.
        """
        ...

    def parse(self, sampled: Ints, tools: Sequence[Mapping[str, Any]]) -> Parsed:
        """Return the message that the sampled tokens express."""
        ...

    def text(self, token_ids: Ints) -> str:
        """Return the text of tokens, including special ones."""
        ...
