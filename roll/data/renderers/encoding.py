"""Tokenises rendered text so that no text of a message becomes a special token.

A chat template writes special tokens as text, which the tokenizer converts to tokens. A message of a user, a tool or an
environment may contain the same text. `guarded` breaks such text with a guard: a character that occurs nowhere else.
`Encoder.encode` converts only unbroken text to special tokens, and removes the guard from the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from roll.data.native import TemplateFault, special_marks
from roll.data.pictures import expanded
from roll.data.renderers.base import Expansions
from roll.data.renderers.templates import Messages, RenderTurns, Tools
from roll.types import Ints

PRIVATE = range(0xF0000, 0xFFFFE)
"""Code points for private use, to which Unicode assigns no character."""


class Encoder:
    """Converts text to tokens and back, for one tokenizer.

    Attributes:
        marks: token id of each special token by its text; see `special_marks`.
        longest_token: upper bound of the characters of a token. Vocabularies write a token with at least one character
            for each of its bytes or characters.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, pictures: tuple[str, ...] = ()) -> None:
        """Raise ValueError if the tokenizer is not one of `tokenizers`.

        Args:
            template: the chat template's text.
            pictures: special tokens that stand for pictures, which no text of the assistant may become either.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ValueError("its tokenizer is not one of the library 'tokenizers' (it has no tokenizer.json)")
        added = tokenizer.added_tokens_decoder
        self.marks: Mapping[str, int] = special_marks(tokenizer, template)
        self.longest_token = max(map(len, backend.get_vocab()))
        self._tokenizer = tokenizer
        self._whole: Tokenizer = backend
        self._strip_left = {token.content for token in added.values() if token.lstrip}
        self._strip_right = {token.content for token in added.values() if token.rstrip}
        self._added = {token.content: number for number, token in added.items()}
        self._any, self._mark = _pattern(self._added), _pattern(self.marks)
        self._first, self._later = (_plain(backend, self._added, first) for first in (True, False))
        self._picture = _pattern(pictures)
        self._forbidden = frozenset(self.marks.values())

    def encode(self, text: str, guard: str = "", first: bool = True) -> list[int]:
        """Return the tokens of `text`.

        Args:
            guard: the character that `guarded` inserted, which is left out.
            first: whether the text begins a sequence.

        Raises:
            TemplateFault: the tokenizer converts plain text to a special token.
        """
        pieces, marks = self._any.split(text), self._any.findall(text)
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            if number and marks[number - 1] in self._strip_right:
                piece = piece.lstrip()
            if number < len(marks) and marks[number] in self._strip_left:
                piece = piece.rstrip()
            plain = piece.replace(guard, "") if guard else piece
            if plain:
                backend = self._first if first and not number else self._later
                # Other threads run meanwhile, as they do not in `encode`.
                found = backend.encode_batch_fast([plain], add_special_tokens=False)[0].ids
                if not self._forbidden.isdisjoint(found):
                    raise TemplateFault(
                        f"the tokenizer converts a part of the plain text {plain[:80]!r} to a special token"
                    )
                ids += found
            if number < len(marks):
                ids.append(self._added[marks[number]])
        return ids

    def check(self, text: str) -> None:
        """Raise TemplateFault if the tokens of `encode` differ from the tokenizer's own for this text."""
        if self._whole.encode(text, add_special_tokens=False).ids != self.encode(text):
            raise TemplateFault(
                f"its tokenizer tokenises {text!r} differently if plain text and special tokens are encoded separately"
            )

    def decode(self, token_ids: Ints | Sequence[int]) -> str:
        """Return the text of tokens, including special ones."""
        text = self._tokenizer.decode(
            [int(one) for one in token_ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def decode_guarded(self, token_ids: Ints | Sequence[int], guard: str) -> str:
        """Return the text of tokens. Text that only looks like a special token is broken with `guard`."""
        special = {number: mark for mark, number in self.marks.items()}
        parts: list[str] = []
        run: list[int] = []
        for one in (*(int(one) for one in token_ids), None):
            if one is not None and one not in special:
                run.append(one)
                continue
            if run:
                parts.append(self.guarded(self.decode(run), guard))
                run = []
            if one is not None:
                parts.append(special[one])
        return "".join(parts)

    def guarded(self, text: str, guard: str) -> str:
        """Insert `guard` after the first character of everything that looks like a special token."""
        return _broken(text, guard, self._mark)

    def guarded_messages(self, messages: Messages) -> tuple[str, list[dict[str, Any]]]:
        """Return a guard for the messages, and the messages guarded with it."""
        guard = guard_for([json.dumps(list(messages), ensure_ascii=False)])
        return guard, [self.guarded_message(message, guard) for message in messages]

    def guarded_message(self, message: Mapping[str, Any], guard: str) -> dict[str, Any]:
        """Return the message with its texts guarded. In those of the assistant, which are the policy's own, only what
        looks like a picture is.
        """
        marks = self._picture if message["role"] == "assistant" else self._mark
        return {key: value if key == "role" else _guarded_value(value, guard, marks) for key, value in message.items()}


def _guarded_value(value: Any, guard: str, marks: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return _broken(value, guard, marks)
    if isinstance(value, Mapping):
        return {key: _guarded_value(one, guard, marks) for key, one in value.items()}
    return [_guarded_value(one, guard, marks) for one in value] if isinstance(value, list | tuple) else value


def _broken(text: str, guard: str, marks: re.Pattern[str]) -> str:
    while (found := marks.search(text)) and found.end() - found.start() > 1:
        text = marks.sub(lambda mark: mark[0][0] + guard + mark[0][1:], text)
    return text


def render_tokens(
    encoder: Encoder, render: RenderTurns, messages: Messages, tools: Tools, shown: Expansions | None = None
) -> Ints:
    """Return the tokens of a whole conversation, with an assistant turn opened at the end.

    Args:
        shown: the pictures of the conversation. None: a picture has a single token.
    """
    guard, guarded = encoder.guarded_messages(messages)
    return ints(encoder.encode(with_pictures(render(guarded, tools, True), shown), guard))


def with_pictures(text: str, shown: Expansions | None) -> str:
    """Return a rendered text with the placeholders of its pictures. Raises TemplateFault if it has others."""
    if shown is None:
        return text
    if (written := text.count(shown.token)) != len(shown.texts):
        raise TemplateFault(f"it writes {written} times {shown.token} for {len(shown.texts)} picture(s)")
    return expanded([text], shown.token, shown.texts)[0]


def guard_for(texts: Iterable[str]) -> str:
    """Return a character that occurs in none of the texts."""
    used = {character for text in texts for character in text if ord(character) >= PRIVATE.start}
    return next(chr(point) for point in PRIVATE if chr(point) not in used)


def ints(token_ids: Sequence[int]) -> Ints:
    """Return token ids as an array."""
    return np.asarray(token_ids, np.int32)


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the texts. Without texts it matches nothing."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)")


def _plain(backend: Tokenizer, added: Mapping[str, int], first: bool) -> Tokenizer:
    """Return a copy of the tokenizer without added tokens. `first`: it encodes a sequence's beginning."""
    description = json.loads(backend.to_str())
    description["added_tokens"] = []
    description["post_processor"] = description["truncation"] = description["padding"] = None
    vocabulary = description["model"].get("vocab")
    if isinstance(vocabulary, dict):
        kept = description["model"].get("unk_token")
        description["model"]["vocab"] = {
            text: number for text, number in vocabulary.items() if text not in added or text == kept
        }
    if not first:
        _not_first(description["pre_tokenizer"])
    return Tokenizer.from_str(json.dumps(description))


def _not_first(step: dict[str, Any] | None) -> None:
    """Change a pre-tokenizer in place not to prepend SentencePiece's space, which belongs at a sequence's start."""
    for inner in (step or {}).get("pretokenizers", ()):
        _not_first(inner)
    if step and step.get("prepend_scheme") == "first":
        step["prepend_scheme"] = "never"
