"""Random conversations in seven chat formats. Each new context only appends to the tokens that the engine saw and
sampled before.

As long as the model's own chat template also only appends, the context has the text that the template writes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from roll.data.renderers.base import ChatRenderer
from tests.unit.data.formats import FORMATS, Format, make_renderer, make_tokenizer

QUICK, MANY = 12, 150
"""Conversations per format in the quick and in the full test. Over all seven formats, the full test runs more than
1,000.
"""
PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["query"],
}
TOOLS = [{"type": "function", "function": {"name": "search", "description": "Searches.", "parameters": PARAMETERS}}]
CHARACTERS = st.characters(codec="utf-8", exclude_categories=["Cc", "Co"])
PLAIN = st.text(st.one_of(st.sampled_from(" \n\t.,a1é漢🙂Ω"), CHARACTERS), max_size=30)
WRITTEN = st.text(
    st.one_of(st.sampled_from(" aeinst.é漢🙂1"), st.characters(codec="utf-8", categories=["L", "N"])),
    min_size=1,
    max_size=30,
)
"""Texts that the policy writes. They contain no tags."""


@dataclass(frozen=True)
class Turn:
    """One turn of the policy, and the messages that answer it."""

    message: Mapping[str, Any]
    odd: int | None
    """Seed for splitting some of the tokens in two; None keeps the tokenizer's own tokenisation."""
    ends: bool
    """Whether the policy samples the end of its turn."""
    answers: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Talk:
    """A conversation: its first messages, the policy's turns, and the tools."""

    first: Sequence[Mapping[str, Any]]
    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, Any]]


@cache
def world(name: str) -> tuple[Format, PreTrainedTokenizerBase, ChatRenderer]:
    with TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(FORMATS[name])
        return FORMATS[name], tokenizer, make_renderer(FORMATS[name], tokenizer, Path(folder))


def said(chat: Format) -> st.SearchStrategy[str]:
    """Texts that the policy does not write: of users, tools and the system message. Some contain the texts of special
    tokens.
    """
    return st.lists(st.one_of(PLAIN, st.sampled_from(chat.added)), min_size=1, max_size=4).map("".join)


@st.composite
def turns(draw: st.DrawFn, chat: Format, thinks: bool) -> Turn:
    message: dict[str, Any] = {"role": "assistant", "content": draw(WRITTEN).strip() or "So"}
    if thinks:
        message["reasoning_content"] = draw(WRITTEN).strip() or "Hm"
    calls = draw(st.integers(0, 1 if chat.model_type == "llama" else 3)) if chat.tools else 0
    if calls:
        arguments = [{"query": draw(WRITTEN).strip() or "x", "count": draw(st.integers())} for _ in range(calls)]
        functions = [{"name": "search", "arguments": json.dumps(one, ensure_ascii=False)} for one in arguments]
        message["tool_calls"] = [
            {"id": f"call{n:05d}", "type": "function", "function": one} for n, one in enumerate(functions)
        ]
        message["content"] = "" if chat.model_type == "llama" else draw(st.sampled_from(["", message["content"]]))
        answers = [
            {"role": "tool", "tool_call_id": f"call{n:05d}", "name": "search", "content": draw(said(chat))}
            for n in range(calls)
        ]
    else:
        answers = [{"role": "user", "content": draw(said(chat))}]
    return Turn(message, draw(st.none() | st.integers(0, 99)), draw(st.booleans()), answers)


@st.composite
def talks(draw: st.DrawFn, name: str) -> Talk:
    chat = FORMATS[name]
    first = [{"role": "system", "content": draw(said(chat))}] if chat.system and draw(st.booleans()) else []
    spoken = draw(st.lists(turns(chat, name in ("qwen3", "glm")), min_size=1, max_size=4))
    tools = TOOLS if chat.tools and any("tool_calls" in turn.message for turn in spoken) else []
    return Talk([*first, {"role": "user", "content": draw(said(chat))}], spoken, tools)


def written(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], talk: Talk, generate: bool
) -> str:
    """Return the text that the model's own chat template renders, without using roll."""
    plain: list[Any] = deepcopy(list(messages))
    for call in [call for one in plain for call in one.get("tool_calls", ())]:
        call["function"] = {"name": "search", "arguments": json.loads(call["function"]["arguments"])}
    text = tokenizer.apply_chat_template(
        plain, tools=[dict(tool) for tool in talk.tools] or None, tokenize=False, add_generation_prompt=generate
    )
    assert isinstance(text, str)
    return text


def sampled_tokens(tokenizer: PreTrainedTokenizerBase, chat: Format, turn: Turn, text: str) -> list[int]:
    """Return the tokens of the policy's text: the tokenizer's own or, if `turn.odd` is set, with some of them split in
    two.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    if turn.odd is None:
        return ids
    draw, vocabulary, found = random.Random(turn.odd), tokenizer.get_vocab(), list[int]()
    for number, piece in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        cuts = [cut for cut in range(1, len(piece)) if {piece[:cut], piece[cut:]} <= vocabulary.keys()]
        if piece in chat.added or not cuts or draw.random() < 0.5:
            found.append(number)
        else:
            cut = draw.choice(cuts)
            found += [vocabulary[piece[:cut]], vocabulary[piece[cut:]]]
    return found


def specials(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], chat: Format) -> int:
    added = {tokenizer.get_vocab()[text] for text in chat.added}
    return sum(number in added for number in ids)


def defused(message: Mapping[str, Any], chat: Format) -> dict[str, Any]:
    """Return the message without the texts of special tokens. Messages of the policy stay unchanged."""
    text = message["content"]
    while any(mark in text for mark in chat.added):
        for mark in chat.added:
            text = text.replace(mark, "x")
    return {**message, "content": text} if message["role"] != "assistant" else dict(message)


def check(name: str, talk: Talk) -> None:
    chat, tokenizer, renderer = world(name)
    messages = list(talk.first)
    stream: list[int] = renderer.render(messages, talk.tools).tolist()
    assert renderer.text(np.array(stream, np.int32)) == written(tokenizer, messages, talk, True)
    append_only, canonical = True, True
    for turn in talk.turns:
        alone = [*messages, turn.message]
        opened, whole = written(tokenizer, messages, talk, True), written(tokenizer, alone, talk, False)
        assert whole.startswith(opened)
        sampled = sampled_tokens(tokenizer, chat, turn, whole[len(opened) :].rstrip("\n"))
        if name == "glm" and turn.ends:
            sampled.append(tokenizer.get_vocab()["<|observation|>" if "tool_calls" in turn.message else "<|user|>"])
        elif name != "glm" and not turn.ends:
            sampled = sampled[:-1]  # the end of the turn is one token
        parsed = renderer.parse(np.array(sampled, np.int32), talk.tools)
        assert parsed.message == turn.message
        assert not parsed.malformed
        before = np.array(stream, np.int32)
        bridge = renderer.bridge(before, np.array(sampled, np.int32), turn.answers, talk.tools)
        assert bridge is not None
        stream = [*stream, *sampled, *bridge.tolist()]
        messages = [*alone, *turn.answers]
        text = written(tokenizer, messages, talk, True)
        # roll closes an unfinished turn of GLM with a token that GLM's template never writes.
        append_only = append_only and text.startswith(whole) and (name != "glm" or turn.ends)
        canonical = canonical and turn.odd is None
        if append_only:
            assert renderer.text(np.array(stream, np.int32)) == text
        plain = [defused(message, chat) for message in messages]
        if append_only and canonical:
            wanted = tokenizer.encode(written(tokenizer, plain, talk, True), add_special_tokens=False)
            assert specials(tokenizer, stream, chat) == specials(tokenizer, wanted, chat)
            assert stream == wanted or plain != messages
        assert text.endswith(renderer.text(bridge).removeprefix("<|endoftext|>" if name == "glm" else ""))


@pytest.mark.parametrize("name", FORMATS)
def test_conversations_are_continued_exactly(name: str) -> None:
    @settings(max_examples=QUICK)
    @given(talks(name))
    def run(talk: Talk) -> None:
        check(name, talk)

    run()


@pytest.mark.full
@pytest.mark.parametrize("name", FORMATS)
def test_many_conversations_are_continued_exactly(name: str) -> None:
    @settings(max_examples=MANY)
    @given(talks(name))
    def run(talk: Talk) -> None:
        check(name, talk)

    run()
