"""Renders messages to text with a chat template, and finds what ends a response in it. Pure functions.

A response ends with the template's end of an assistant's turn, which the model learns and the engine must stop on. A
model's own end of sequence need not be it. Base models (Qwen2.5, Qwen3-Base) have a ChatML template, which ends turns
with `<|im_end|>`, and stop on `<|endoftext|>`, which no turn of theirs has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix
from types import MappingProxyType
from typing import Any, Literal, Protocol

from transformers import PreTrainedTokenizerBase

from roll.config.schema.model import DataConfig
from roll.data.messages import REASONING
from roll.data.native import (
    ASKED,
    MORE,
    PROBE,
    TAGS,
    THINK,
    Messages,
    NativeTemplate,
    TemplateFault,
    opening,
    special_marks,
)
from roll.data.picture_parts import PICTURES
from roll.data.turns import RenderMessages, Turns, inline, is_learnt, marked_pieces
from roll.errors import DataError, Fault

NOTHING: Mapping[str, Any] = MappingProxyType({})
MarkedSpans = Callable[[Messages], Sequence[tuple[int, int]]]
"""messages -> spans of their text that the template marks as generated, [first, end) in characters"""


class Render(Protocol):
    """Renders messages to text."""

    def __call__(self, messages: Messages, generate: bool, further: Mapping[str, Any] = NOTHING) -> str:
        """Return the text of `messages`; `generate` opens an assistant's turn at the end, `further` are arguments."""
        ...


WRITTEN = MORE[:2]
"""Optional keys of an assistant's turn. A template that ignores one would leave a part of the turn out."""
QWEN2_5_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
Template = Literal["native", "chatml", "qwen2_5", "raw"]
MARKED: Mapping[str, Sequence[str]] = dict.fromkeys(("chatml", "qwen2_5"), ("<|im_start|>", "<|im_end|>"))
"""Marks that roll's own templates write, by template."""


class ChatTemplate:
    """Renders messages with one template. Implements `Render`; raises TemplateFault for what it cannot express."""

    def __init__(self, template: Template, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ValueError if `template` is `native` but the tokenizer has none, or it has marks that this lacks."""
        if template == "native" and not tokenizer.chat_template:
            raise ValueError(f"the tokenizer of '{tokenizer.name_or_path}' has no chat template of its own")
        check_marks(template, tokenizer)
        self._template: Template = template
        self._native = NativeTemplate(tokenizer) if template == "native" else None
        # Roll's own templates write no BOS; without it, models that were trained with it (Gemma, Llama) write nonsense.
        self._opening = opening(tokenizer) if template in MARKED else ""
        self.marks: Collection[str] = frozenset(special_marks(tokenizer, self._native.source if self._native else ""))
        """Special tokens of the tokenizer."""

    @property
    def marks_turns(self) -> bool:
        """Whether the template marks what the assistant generates, with `{% generation %}` blocks."""
        return self._native is not None and self._native.marks_turns

    def __call__(self, messages: Messages, generate: bool, further: Mapping[str, Any] = NOTHING) -> str:
        for key in self.unread(further):
            raise TemplateFault(f"the row has '{key}', which the template '{self._template}' does not read")
        if self._native is None:
            self._check_written(messages, (*WRITTEN, PICTURES))
            return self._opening + OWN_TEMPLATES[self._template](messages, generate)
        return self._native.text(self._written(messages, self._native, further), generate, further)

    def spans(self, messages: Messages, further: Mapping[str, Any] = NOTHING) -> list[tuple[int, int]]:
        """Return the spans of the text of `messages` that the template marks as generated, [first, end)."""
        assert self._native is not None
        return self._native.generated(self._written(messages, self._native, further), further)

    def unread(self, further: Mapping[str, Any]) -> list[str]:
        """Return the arguments that the template does not read."""
        return list(further) if self._native is None else self._native.unread(further)

    def _written(self, messages: Messages, native: NativeTemplate, further: Mapping[str, Any]) -> Messages:
        """Return the messages with only keys that the template writes. Thinking that it opens, but has no key for,
        joins the content.
        """
        self._check_written(messages, [key for key in WRITTEN[:1] if key not in native.source])
        if native.form.reasoning is not None or not any(REASONING[0] in message for message in messages):
            return messages
        if not native.text([ASKED], True, further).rstrip().endswith(THINK):
            self._check_written(messages, REASONING[:1])
        return [
            {key: value for key, value in message.items() if key != REASONING[0]}
            | {"content": inline(message) or message["content"]}
            for message in messages
        ]

    def _check_written(self, messages: Messages, lost: Sequence[str]) -> None:
        for key in [key for message in messages for key in lost if key in message]:
            raise TemplateFault(f"a message has '{key}', which the template '{self._template}' does not write")


def renderer(template: Template, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """Return the function that renders messages with `template`. Raises ValueError as `ChatTemplate` does."""
    return ChatTemplate(template, tokenizer)


def checked_renderer(data_args: DataConfig, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """Return the renderer of `data_args.template`. Raises DataError for a misfit or keys that it does not read."""
    try:
        found = renderer(data_args.template, tokenizer)
    except ValueError as error:
        problem = f"is '{data_args.template}', but {error}"
        raise DataError(Fault("data_args.template", problem, template_remedy(data_args.template), "unfit")) from error
    if unread := found.unread(data_args.chat_template_kwargs or {}):
        problem = f"has '{unread[0]}', which the template '{data_args.template}' does not read"
        raise DataError(
            Fault(
                "data_args.chat_template_kwargs",
                problem,
                "remove it, or use a tokenizer whose template reads it",
                "unread",
            )
        )
    return found


def template_remedy(template: str) -> str:
    """Return the remedy for a template that does not fit the tokenizer."""
    if template in MARKED:
        return "set it to `native` or `raw`, or use a tokenizer that has <|im_start|> and <|im_end|>"
    return "set it to `chatml`, `qwen2_5` or `raw`, or use a tokenizer that has a chat template"


def check_marks(template: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if a mark of one of roll's own templates is not a single token of the tokenizer."""
    for mark in MARKED.get(template, ()):
        found: Any = tokenizer.encode(mark, add_special_tokens=False)
        if len(found) != 1 or found[0] == tokenizer.unk_token_id:
            problem = f"{mark} is {len(found)} tokens of the tokenizer of '{tokenizer.name_or_path}', not one"
            raise ValueError(f"{problem}, so that the model would not recognise the turns")


def chatml(messages: Messages, generate: bool) -> str:
    """Render each message as `<|im_start|>role`, newline, content, `<|im_end|>`, newline."""
    turns = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return turns + ("<|im_start|>assistant\n" if generate else "")


def qwen2_5(messages: Messages, generate: bool) -> str:
    """Render ChatML, with Qwen2.5's own system message if the conversation has none."""
    if not messages or messages[0]["role"] != "system":
        messages = [{"role": "system", "content": QWEN2_5_SYSTEM}, *messages]
    return chatml(messages, generate)


def raw(messages: Messages, generate: bool) -> str:
    """Render only the contents, with an empty line between them, for base models. Raises TemplateFault without any."""
    if not messages:
        raise TemplateFault("the template 'raw' opens no turn without a message before it")
    text = "\n\n".join(message["content"] for message in messages[:-1] if message["content"])
    last = messages[-1]
    if last["role"] == "assistant":
        return text + last["content"]
    return f"{text}\n\n{last['content']}" if text else last["content"]


OWN_TEMPLATES: Mapping[str, RenderMessages] = {"chatml": chatml, "qwen2_5": qwen2_5, "raw": raw}


def render_example(
    messages: Messages, render: RenderMessages, eos_token: str, marks: Collection[str] = ()
) -> tuple[str, str]:
    """Return the prompt and the response as text, for a conversation whose last message is the assistant's.

    Concatenated, the two are the whole conversation, except where the template renders the prompt or the thinking
    differently once the response follows: then the response is what the policy would generate after the prompt. It ends
    with the template's end of a turn, with the special token that begins the next message if the template has no other
    end, or else with `eos_token`. White space after the end is left out, because the policy never generates it.

    Args:
        marks: special tokens of the tokenizer, which may end a turn.

    Raises:
        TemplateFault: the template does not render the conversation as a continuation of its prompt.
    """
    turns = Turns(messages, render, marks)
    prompt = render(messages[:-1], True)
    try:
        spoken = turns.split(messages[:-1], prompt, render(messages, False), messages[-1])
    except TemplateFault:
        if len(turns) == 1:
            raise
        # An earlier turn is rendered differently once an answer follows. What the template writes after the prompt is
        # the same.
        spoken = turns.as_last(len(turns) - 1)
        prompt = prompt.removesuffix(turns.opened(len(turns) - 1)[len(spoken.prompt) :])
        return prompt, turns.last_ending(spoken.text, eos_token)
    return spoken.prompt, turns.last_ending(spoken.text, eos_token)


def with_white_space(response: str, whole: str, marks: Collection[str]) -> str:
    """Return a response of `render_example` with the white space that the template writes after the end of a turn.

    A policy never generates it. But a reward model whose template ends with `<|im_end|>\\n` is trained and read at the
    line break by programs that apply the template to the whole conversation.

    Args:
        whole: the conversation as the template renders it.
        marks: special tokens of the tokenizer, which may end a turn.
    """
    text = whole.rstrip()
    end = next((mark for mark in marks if response.endswith(mark)), response)
    return response + whole[len(text) :] if text.endswith(end) else response


def render_turns(
    messages: Messages,
    render: RenderMessages,
    eos_token: str,
    marks: Collection[str] = (),
    spans: MarkedSpans | None = None,
) -> list[str]:
    """Return the text in pieces: context, assistant's turn, context, assistant's turn, and so on. The last message is
    the assistant's.

    Every turn is as the template renders it when it is the last one, also if it drops the thinking of earlier turns,
    with the end that the template writes when others follow. The context of a turn is as the template renders it. A
    message with `train: false` is context.

    Args:
        marks: special tokens of the tokenizer, which may end a turn.
        spans: returns the parts of a conversation's text that the template itself marks as generated; None learns whole
            turns.

    Raises:
        TemplateFault: the template renders the beginning of the conversation differently if more messages follow, or no
            message is learnt.
    """
    turns = Turns(messages, render, marks)
    pieces, context = [], ""
    for turn, number in enumerate(turns.numbers):
        spoken, opened = turns.as_last(turn), turns.opened(turn)
        context = context.removesuffix(opened[len(spoken.prompt) :]) if turn else spoken.prompt
        following = ""
        if turn + 1 < len(turns):
            text, following = turns.ending(turn, spoken.text)
            turns.check_context(turn, spoken.prompt, following)
        else:
            text = turns.last_ending(spoken.text, eos_token)
        if not is_learnt(messages[number]):
            context += text + following
            continue
        before, *parts = ["", text]
        if spans and spoken.first is not None:
            before, *parts = marked_pieces(text, spoken.first, spans(turns.until(turn)))
        pieces += [context + before, *parts]
        context = following
    return pieces


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
    placeholder: int | None = None
    """The token that stands for a picture; see `Sampling.placeholder`. None for models that see none."""


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
    """Return what ends a turn in the format of `data_args`; nothing for plain text. Raises ValueError for a misfit."""
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
