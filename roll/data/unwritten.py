"""Finds texts of messages that a chat template does not write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roll.data.messages import REASONING
from roll.data.native import THINK, THOUGHT, Messages, TemplateFault, message_calls, with_arguments
from roll.data.turns import unused_word

SURE = 12
"""Length in characters from which a text that occurs in a rendering is not there by chance."""
TURN_TAGS = re.compile(f"{re.escape(THINK)}|{re.escape(THOUGHT)}")
UNWRITTEN = "have {} that the chat template does not write, so that the model does not see it"
"""A remark on rows; see `Texts.remarks`."""
NAME = "a message's name"
LearntText = Callable[[Messages], str]
"""A conversation that ends with the assistant's message -> text of that turn, as it is learnt"""
ContextText = Callable[[Messages], str]
"""A conversation -> its text, with an assistant turn opened at the end"""


@dataclass(frozen=True)
class MessagePart:
    """A part of a message."""

    name: str
    text: str


Change = Callable[[str], Mapping[str, Any]]
"""A word -> the message with the word in place of one part"""


class Unwritten:
    """Finds what one template does not write. It remembers by kind of message, so that few are rendered again."""

    def __init__(self) -> None:
        self._written: dict[tuple[Any, ...], bool] = {}

    def check_learnt(self, messages: Messages, text: str, learnt_text: LearntText) -> None:
        """Check the last message, an assistant's turn that is learnt.

        Args:
            text: the text that is learnt.
            learnt_text: returns that text for another conversation.

        Raises:
            TemplateFault: the template does not write a part of the turn.
        """
        last = messages[-1]
        for part, changed in _parts(last, whole=True):
            if not self._is_written(
                last, part, text, lambda word, change=changed: learnt_text([*messages[:-1], change(word)])
            ):
                problem = f"the template does not write {part.name} of the assistant's message {len(messages)}"
                raise TemplateFault(f"{problem}, so that it would not be learnt: {part.text[:60]!r}")

    def in_context(
        self, messages: Messages, text: str, context_text: ContextText, learnt: Collection[int] = ()
    ) -> list[str]:
        """Return what the template does not write of messages that are not learnt, without repetitions.

        Args:
            text: the text of the messages.
            learnt: indices of messages to leave out.

        Raises:
            TemplateFault: the template does not write the text of a user's message, without which the row has no
                meaning.
        """
        lost: dict[str, None] = {}
        for number, message in enumerate(messages):
            if number in learnt:
                continue
            for part, changed in _parts(message, whole=False):

                def again(word: str, number: int = number, change: Change = changed) -> str:
                    return context_text([*messages[:number], change(word), *messages[number + 1 :]])

                if self._is_written(message, part, text, again, number == 0):
                    continue
                if message["role"] == "user" and part.name != NAME:
                    raise TemplateFault(
                        f"the template does not write the text of the user's message {number + 1}: {part.text[:60]!r}"
                    )
                lost[NAME if part.name == NAME else _place(message, number)] = None
        return list(lost)

    def _is_written(
        self, message: Mapping[str, Any], part: MessagePart, text: str, again: Callable[[str], str], first: bool = False
    ) -> bool:
        if len(part.text) >= SURE and (part.text in text or json.dumps(part.text, ensure_ascii=False)[1:-1] in text):
            return True
        calls = min(len(message_calls(message)), 2)
        kind = (message["role"], part.name, calls, REASONING[0] in message, first)
        if len(part.text) >= SURE or kind not in self._written:
            word = unused_word(text)
            try:
                self._written[kind] = word in again(word)
            except TemplateFault:  # the template has a rule for this very text, so that it reads it
                return True
        return self._written[kind]


def _parts(message: Mapping[str, Any], whole: bool) -> Iterator[tuple[MessagePart, Change]]:
    """Yield the parts of a message. Without `whole`, leave out thinking, which many templates drop from earlier turns
    on purpose.

    The name of a message is a part only without `whole`: a policy never writes its own. The name in a tool's answer
    repeats the call's.
    """
    content = message["content"]
    pieces = TURN_TAGS.split(content) if message["role"] == "assistant" else [content]
    for piece in pieces if whole else pieces[-1:]:
        if text := piece.strip():
            yield (
                MessagePart("the text" if piece == pieces[-1] else "the thinking", text),
                _replaced(message, "content", content, text),
            )
    reasoning = message.get(REASONING[0])
    if whole and isinstance(reasoning, str) and reasoning.strip():
        yield (
            MessagePart("the thinking", reasoning.strip()),
            _replaced(message, REASONING[0], reasoning, reasoning.strip()),
        )
    if not whole and message["role"] != "tool" and isinstance(name := message.get("name"), str):
        yield MessagePart(NAME, name), lambda word: {**message, "name": word}
    if calls := message_calls(message):
        yield (
            MessagePart("a tool call", ""),
            lambda word: {**message, "tool_calls": [*calls[:-1], with_arguments(calls[-1], {"leaf": word})]},
        )


def _replaced(message: Mapping[str, Any], key: str, whole: str, text: str) -> Change:
    before, _, after = whole.rpartition(text)
    return lambda word: {**message, key: before + word + after}


def _place(message: Mapping[str, Any], number: int) -> str:
    if message["role"] == "assistant":
        return (
            "an earlier turn's text beside a tool call"
            if message.get("tool_calls")
            else "an earlier turn of the assistant"
        )
    if message["role"] == "system":
        return "a system message after the first message" if number else "the system message"
    return "a tool's answer"
