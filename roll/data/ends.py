"""Finds what ends a response: the template's end of an assistant's turn, which the model learns and the engine must
stop on.

A model's own end of sequence need not be it. Base models (Qwen2.5, Qwen3-Base) have a ChatML template, which ends turns
with `<|im_end|>`, and stop on `<|endoftext|>`, which no turn of theirs has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from roll.config.schema.model import DataConfig
from roll.data.chat import ChatTemplate, renderer
from roll.data.native import ASKED, PROBE, TAGS, TemplateFault
from roll.data.turns import RenderMessages, Turns

CALLS = [
    {"id": f"call{number:05d}", "type": "function", "function": {"name": "feed", "arguments": {"leaf": PROBE}}}
    for number in range(2)
]


@dataclass(frozen=True)
class EndOfTurn:
    """What ends an assistant's turn. Empty if the template marks no end: only the model's end of sequence is left."""

    token_ids: tuple[int, ...] = ()
    """Tokens that end a turn."""
    texts: tuple[str, ...] = ()
    """Ends that are no single token of the tokenizer."""


NO_END = EndOfTurn()


def end_of_turn(
    template: ChatTemplate, tokenizer: PreTrainedTokenizerBase, further: Mapping[str, Any] | None = None
) -> EndOfTurn:
    """Return what ends a turn of the assistant, found in the text of two probes: an answer and a turn of two tool
    calls.

    Args:
        further: additional arguments of the template.
    """
    render = partial(_rendered, template, further or {})
    marks = sorted(set(template.marks) - set(TAGS), key=len, reverse=True)
    said = _ending({"role": "assistant", "content": PROBE}, render, marks)
    # Some templates write more after the last turn than after others: Phi-3 writes <|end|> after each, and then
    # <|endoftext|>.
    shared = commonprefix([said, _followed(render)])
    end = _last_mark(shared, marks) or _first_mark(said, marks) or said.strip()
    called = _ending({"role": "assistant", "content": "", "tool_calls": CALLS}, render, marks)
    token_ids = [_token(tokenizer, text) for text in dict.fromkeys([end, _last_mark(called, marks)]) if text]
    known = tuple(number for number in token_ids if number is not None)
    return EndOfTurn(known, (end,) if end and _token(tokenizer, end) is None else ())


def ends_of(data_args: DataConfig | None, tokenizer: PreTrainedTokenizerBase) -> EndOfTurn:
    """Return what ends a turn in the format of `data_args`; nothing for text without a template.

    Raises:
        ValueError: the template does not fit the tokenizer.
    """
    if data_args is None or data_args.text is not None or data_args.template == "raw":
        return NO_END
    return end_of_turn(renderer(data_args.template, tokenizer), tokenizer, data_args.chat_template_kwargs)


def _rendered(
    template: ChatTemplate, further: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], generate: bool
) -> str:
    return template(messages, generate, further)


def _ending(message: Mapping[str, Any], render: RenderMessages, marks: Sequence[str]) -> str:
    """Return the text after the last probe word of a turn; "" if it cannot be expressed or has no marked end."""
    try:
        turns = Turns([ASKED, message], render, marks)
        text = turns.last_ending(turns.as_last(0).text, "")
    except TemplateFault:
        return ""
    before, _, ending = text.rpartition(PROBE)
    # A mark that also stands between two calls ends a call, not the turn.
    return "" if "tool_calls" in message and _last_mark(ending, marks) in before else ending


def _followed(render: RenderMessages) -> str:
    """Return the text after an answer that a user's message follows; "" if the template cannot express it."""
    try:
        return render([ASKED, {"role": "assistant", "content": PROBE}, ASKED], True).rpartition(PROBE)[2]
    except TemplateFault:
        return ""


def _first_mark(text: str, marks: Sequence[str]) -> str:
    found = [(text.find(mark), mark) for mark in marks if mark in text]
    return min(found, key=lambda one: (one[0], -len(one[1])))[1] if found else ""


def _last_mark(text: str, marks: Sequence[str]) -> str:
    found = [(text.rfind(mark) + len(mark), len(mark), mark) for mark in marks if mark in text]
    return max(found)[2] if found else ""


def _token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    found: Any = tokenizer.encode(text, add_special_tokens=False)
    return int(found[0]) if len(found) == 1 and found[0] != tokenizer.unk_token_id else None
