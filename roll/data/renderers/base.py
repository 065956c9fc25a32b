"""Protocol of renderers, which convert conversations to tokens and back."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from roll.data.native import TemplateFault
from roll.types import Ints

LOG = logging.getLogger(__name__)


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
    longest_token: int
    """Upper bound of the characters of a token. Longer text than this for each token of a context does not fit."""

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


@dataclass(frozen=True)
class Expansions:
    """What takes the place of the pictures of some messages."""

    token: str
    """The text that the template writes once for each picture."""
    texts: tuple[str, ...]
    """The text with the placeholders of each picture, in order."""


class SeeingRenderer(ChatRenderer, Protocol):
    """A `ChatRenderer` that may have been made for a model that sees pictures. Its tokens have one token for each."""

    def showing(self, expansions: Expansions) -> ChatRenderer:
        """Return a renderer that writes as many placeholders as the model needs, for messages with these pictures.

        It raises TemplateFault if the template does not write each picture once.
        """
        ...


@contextmanager
def one_conversation() -> Iterator[None]:
    """A context in which a renderer works on one conversation. Whatever it raises is the fault of that conversation
    alone, because templates, tokenizers and parsers of calls raise errors of any type.

    Raises:
        TemplateFault: the renderer raised.
    """
    try:
        yield
    except TemplateFault:
        raise
    except Exception as error:
        LOG.warning("a conversation cannot be rendered or parsed", exc_info=error)
        raise TemplateFault(f"{type(error).__name__}: {error!s:.200}") from error
