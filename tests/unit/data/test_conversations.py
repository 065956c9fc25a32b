"""Random conversations in seven formats: what the engine sees is what it saw and sampled, and what the model's own template would write."""

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
"""Conversations of each format: seven times MANY are more than 1,000."""
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}, "count": {"type": "integer"}}, "required": ["query"]}
TOOLS = [{"type": "function", "function": {"name": "search", "description": "Searches.", "parameters": PARAMETERS}}]
CHARACTERS = st.characters(codec="utf-8", exclude_categories=["Cc", "Co"])
PLAIN = st.text(st.one_of(st.sampled_from(" \n\t.,a1é漢🙂Ω"), CHARACTERS), max_size=30)
WRITTEN = st.text(
    st.one_of(st.sampled_from(" aeinst.é漢🙂1"), st.characters(codec="utf-8", categories=["L", "N"])), min_size=1, max_size=30
)
"""What the policy writes: no tags."""


@dataclass(frozen=True)
class Turn:
    """What the policy says, how, and what is answered."""

    message: Mapping[str, Any]
    odd: int | None
    """Seed of an unusual tokenisation."""
    ends: bool
    """It samples the end of its turn."""
    answers: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Talk:
    """A conversation."""

    first: Sequence[Mapping[str, Any]]
    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, Any]]


@cache
def world(name: str) -> tuple[Format, PreTrainedTokenizerBase, ChatRenderer]:
    with TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(FORMATS[name])
        return FORMATS[name], tokenizer, make_renderer(FORMATS[name], tokenizer, Path(folder))


def said(chat: Format) -> st.SearchStrategy[str]:
    """What others say, special tokens' texts among it."""
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
        message["tool_calls"] = [{"id": f"call{n:05d}", "type": "function", "function": one} for n, one in enumerate(functions)]
        message["content"] = "" if chat.model_type == "llama" else draw(st.sampled_from(["", message["content"]]))
        answers = [{"role": "tool", "tool_call_id": f"call{n:05d}", "name": "search", "content": draw(said(chat))} for n in range(calls)]
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


def written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], talk: Talk, generate: bool) -> str:
    """The text that the model's own template gives, asked without roll."""
    plain: list[Any] = deepcopy(list(messages))
    for call in [call for one in plain for call in one.get("tool_calls", ())]:
        call["function"] = {"name": "search", "arguments": json.loads(call["function"]["arguments"])}
    text = tokenizer.apply_chat_template(
        plain, tools=[dict(tool) for tool in talk.tools] or None, tokenize=False, add_generation_prompt=generate
    )
    assert isinstance(text, str)
    return text


def sampled_tokens(tokenizer: PreTrainedTokenizerBase, chat: Format, turn: Turn, text: str) -> list[int]:
    """Tokens of the policy's text: the tokenizer's own, or, where the turn is odd, with some of them split in two."""
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
    """What others say, without the texts of special tokens."""
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
        # A turn of GLM that did not end is ended with a token that its template never writes.
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
