"""Chooses the renderer for a model's conversations.

Renders and continues conversations with any chat template that allows it.

Nothing is known about the template except the text it produces. To find the bridge, the tokens that continue a sampled
turn, a probe conversation is rendered in which the assistant's message is a word that occurs nowhere else. The bridge
is the text after that word, up to and including the start of the next assistant turn. It is safe if the template
renders earlier messages in the same way when others follow, and ends a turn with a special token:

    <|im_start|>user
probe<|im_end|>
<|im_start|>assistant
probe<|im_end|>
<|im_start|>user
new<|im_end|>
<|im_start|>assistant

                                                                  └─────────────────────── bridge
                                                                      ───────────────────────────┘

Renderer for the model families that the library `renderers` supports.

The library reimplements published chat templates. It is used only if some trial conversations give the same tokens with
the library and with the model's own template. The template renders whole conversations; the library continues
conversations and parses turns.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from renderers import ParsedToolCall, Renderer, RendererConfig, ToolCallParseStatus, create_renderer
from transformers import PreTrainedTokenizerBase

from roll.data.chat import NOTHING
from roll.data.native import ASKED, PROBE, THINK, THOUGHT, TemplateFault
from roll.data.renderers.base import Expansions, Parsed, SeeingRenderer
from roll.data.renderers.calls import is_call, read_turn
from roll.data.renderers.encoding import Encoder, guard_for, ints, render_tokens, with_pictures
from roll.data.renderers.templates import (
    CALL,
    SYSTEM,
    TOOL,
    TOOLS,
    Messages,
    RenderTurns,
    Tools,
    calling,
    template_message,
    template_text,
    turns_renderer,
)
from roll.errors import BadInput, Fault
from roll.types import Ints

GUARD = "\U000f0000\U000f0001\U000f0002"
"""Guard that breaks special tokens in messages; see `encoding`. It is removed when text is encoded."""
FAMILIES: Mapping[str, Sequence[str]] = {
    "qwen2": ("deepseek-r1",),
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_moe": ("qwen3",),
    "qwen3_5": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_text": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_moe_text": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "llama": ("llama-3", "deepseek-r1"),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "glm4_moe_lite": ("glm-5",),
    "glm_moe_dsa": ("glm-5", "glm-5.1", "glm-5.3"),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1", "kimi-k2"),
    "kimi_k2": ("kimi-k2",),
    "gpt_oss": ("gpt-oss",),
    "gemma4": ("gemma4",),
    "gemma4_text": ("gemma4",),
    "minimax_m2": ("minimax-m2",),
    "nemotron_h": ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
}
"""Names of the library's candidate renderers by `model_type` of config.json."""
FURTHER: Mapping[str, Sequence[Mapping[str, Any]]] = {"llama-3": ({}, {"date_string": time.strftime("%d %b %Y")})}
"""Alternative arguments of some renderers, tried in turn. Llama 3.2's template writes the date."""
REFUSALS = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of the library if the tokenizer lacks a token that it needs, or if a message is not supported."""
SAID: Mapping[str, Any] = {"role": "assistant", "content": PROBE}
ANSWER: Mapping[str, Any] = {"role": "tool", "content": "Fed.", "tool_call_id": "call00000", "name": TOOL}
# Trial conversations that the library and the template must render alike.
TRIALS: Sequence[tuple[Messages, Tools]] = (
    ([ASKED], ()),
    ([SYSTEM, ASKED, SAID, ASKED], ()),
    ([SYSTEM, ASKED], TOOLS),
    ([ASKED, calling([CALL]), ANSWER], TOOLS),
)


class FamilyRenderer:
    """A `SeeingRenderer` that uses the library. The policy's thinking in earlier turns is kept."""

    def __init__(self, encoder: Encoder, render: RenderTurns, library: Renderer) -> None:
        self._encoder, self._render_text, self._library = encoder, render, library
        self._shown: Expansions | None = None
        self._opened = self.render([ASKED], ()).tolist()
        self.stop_token_ids = frozenset(library.get_stop_token_ids())
        self.longest_token = encoder.longest_token

    def showing(self, expansions: Expansions) -> FamilyRenderer:
        found = copy.copy(self)
        found._shown = expansions
        return found

    def render(self, messages: Messages, tools: Tools) -> Ints:
        return render_tokens(self._encoder, self._render_text, messages, tools, self._shown)

    def bridge(self, before: Ints, sampled: Ints, messages: Messages, tools: Tools) -> Ints | None:
        """See `ChatRenderer`. Return None also if the library would change sampled tokens, and for messages with
        pictures, whose text only the template writes.
        """
        if any(not isinstance(message.get("content"), str | None) for message in messages):
            return None
        new: list[Any] = [template_message(self._encoder.guarded_message(message, GUARD)) for message in messages]
        known = [*before.tolist(), *sampled.tolist()]
        try:
            found = self._library.bridge_to_next_turn(
                known[: len(before)], known[len(before) :], new, tools=_plain(tools)
            )
        except REFUSALS:
            return None
        if found is None or found.token_ids[: len(known)] != known:
            return None
        return ints(found.token_ids[len(known) :])

    def parse(self, sampled: Ints, tools: Tools) -> Parsed:
        found = self._library.parse_response(sampled.tolist(), tools=_plain(tools), prompt_ids=self._opened)
        message: dict[str, Any] = {"role": "assistant", "content": found.content}
        if found.reasoning_content is not None:
            message |= {"reasoning_content": found.reasoning_content.strip("\n"), "content": found.content.lstrip("\n")}
        readable = [(call, _read(call)) for call in found.tool_calls]
        calls = [
            {"id": call.id or f"call{number:05d}", "type": "function", "function": read}
            for number, (call, read) in enumerate(readable)
            if read is not None
        ]
        return Parsed(
            {**message, "tool_calls": calls} if calls else message,
            [call.raw for call, read in readable if read is None],
        )

    def text(self, token_ids: Ints) -> str:
        return self._encoder.decode(token_ids)

    def follows(self) -> bool:
        """Whether library and template render the trials to the same tokens, and the library parses its tool calls."""
        agreed = 0
        for messages, tools in TRIALS:
            try:
                wanted = self.render(messages, tools).tolist()
            except TemplateFault:
                continue
            plain: list[Any] = [template_message(one) for one in messages]
            try:
                found = self._library.render_ids(plain, tools=_plain(tools), add_generation_prompt=True)
            except REFUSALS:
                return False
            if found != wanted:
                return False
            agreed += 1
        return agreed > 1 and self._reads_calls()

    def _reads_calls(self) -> bool:
        try:
            opened, turn = (
                self._render_text([ASKED], TOOLS, True),
                self._render_text([ASKED, calling([CALL])], TOOLS, False),
            )
        except TemplateFault:
            return True
        if not turn.startswith(opened):
            return True
        calls = (
            self.parse(ints(self._encoder.encode(turn[len(opened) :], first=False)), TOOLS).message.get("tool_calls")
            or ()
        )
        return [{**call["function"], "arguments": json.loads(call["function"]["arguments"])} for call in calls] == [
            CALL
        ]


class _Tokens:
    """The tokenizer as the library sees it. It does not convert guarded text to special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoder: Encoder) -> None:
        self._tokenizer, self._encoder = tokenizer, encoder
        self.name_or_path = ""
        self.unk_token_id, self.eos_token_id = tokenizer.unk_token_id, tokenizer.eos_token_id
        self.chat_template = tokenizer.chat_template

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        assert not add_special_tokens
        return self._encoder.encode(text, GUARD, first=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        assert not skip_special_tokens
        return self._encoder.decode(token_ids)

    def convert_tokens_to_ids(self, token: str) -> Any:
        return self._tokenizer.convert_tokens_to_ids(token)


def family_renderer(
    tokenizer: PreTrainedTokenizerBase, encoder: Encoder, render: RenderTurns, model_path: str | Path
) -> FamilyRenderer | None:
    """Return the renderer of the library that matches the model's own chat template; None if none matches."""
    for library in _candidates(_Tokens(tokenizer, encoder), _model_type(Path(model_path))):
        renderer = FamilyRenderer(encoder, render, library)
        if renderer.follows():
            return renderer
    return None


def _candidates(tokens: _Tokens, model_type: str) -> Iterator[Renderer]:
    for name in FAMILIES.get(model_type, ()):
        for further in FURTHER.get(name, ({},)):
            try:
                config = TypeAdapter(RendererConfig).validate_python(
                    {"name": name, "thinking_retention": "all", **further}
                )
                yield create_renderer(tokens, config)
            except REFUSALS:
                continue


def _model_type(folder: Path) -> str:
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(described.get("model_type", "")) if isinstance(described, dict) else ""


def _plain(tools: Tools) -> list[Any] | None:
    return [dict(tool) for tool in tools] or None


def _read(call: ParsedToolCall) -> dict[str, str] | None:
    """Return the name and the arguments of a call in OpenAI's format; None if the call could not be parsed."""
    arguments = call.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    readable = call.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
    if not readable or not is_call({"name": call.name, "arguments": arguments}):
        return None
    return {"name": str(call.name), "arguments": json.dumps(arguments, ensure_ascii=False)}


NO_CALLS = 'its chat template does not write tool calls as <tool_call>{{"name": ..., "arguments": ...}}</tool_call>: {}'


@dataclass(frozen=True)
class TurnEnd:
    """The template's end of an assistant's turn."""

    mark: str
    """Special token that ends the turn. The policy samples it last."""
    after: str
    """White space that the template writes after the mark."""


class TemplateRenderer:
    """A `SeeingRenderer` for a chat template. `check` raises if conversations in its format cannot be continued."""

    def __init__(self, encoder: Encoder, render: RenderTurns, eos_token_id: int | None) -> None:
        """
        Raises:
            TemplateFault: the template cannot render a conversation, or ends a turn without a special token.
        """
        self._encoder, self._render_text = encoder, render
        self._shown: Expansions | None = None
        opened = render([ASKED], (), True)
        self._thinks = THINK in opened and THOUGHT not in opened[opened.rfind(THINK) :]
        ending = self._ending([ASKED, {"role": "assistant", "content": PROBE}], ())
        said = render([ASKED, {"role": "assistant", "content": PROBE}], (), False)
        if said[said.rfind(PROBE) + len(PROBE) :].strip() != ending.mark:
            raise TemplateFault("it ends a turn of the assistant with more than one special token")
        self._endings = {False: ending}
        try:
            self._endings[True] = self._ending(_history([{"role": "tool", "content": PROBE}]), TOOLS)
            self.no_calls: str | None = self._unreadable()
        except TemplateFault as fault:
            self.no_calls = NO_CALLS.format(fault)
        self._no_system = self._moving()
        marks = {encoder.marks[one.mark] for one in self._endings.values()}
        self._closing = frozenset(marks)
        self.longest_token = encoder.longest_token
        self.stop_token_ids = frozenset(marks if eos_token_id is None else {*marks, eos_token_id})

    def showing(self, expansions: Expansions) -> TemplateRenderer:
        found = copy.copy(self)
        found._shown = expansions
        return found

    def render(self, messages: Messages, tools: Tools) -> Ints:
        """See `ChatRenderer`.

        Raises:
            TemplateFault: the template rejects the messages, there are tools and the template's tool calls cannot be
                parsed, or there is a system message and the template moves it when others follow.
        """
        if tools and self.no_calls:
            raise TemplateFault(self.no_calls)
        if self._no_system and any(message["role"] == "system" for message in messages):
            raise TemplateFault(self._no_system)
        return render_tokens(self._encoder, self._render_text, messages, tools, self._shown)

    def bridge(self, before: Ints, sampled: Ints, messages: Messages, tools: Tools) -> Ints | None:
        """See `ChatRenderer`. Return None also if the template rejects the messages."""
        if not messages or any(message["role"] == "assistant" for message in messages):
            return None
        try:
            ending, text, guard = self._following(messages, tools)
            ids = self._encoder.encode(with_pictures(text, self._shown), guard, first=False)
        except TemplateFault:
            return None
        assert ids[0] == self._encoder.marks[ending.mark]
        closed = len(sampled) > 0 and int(sampled[-1]) in self._closing
        return ints(ids[1:] if closed else ids)

    def parse(self, sampled: Ints, tools: Tools) -> Parsed:
        """See `ChatRenderer`. A tag that is a special token counts only if that token was sampled, not its text."""
        said = sampled[:-1] if len(sampled) and int(sampled[-1]) in self.stop_token_ids else sampled
        guard = guard_for([self._encoder.decode(said)])
        written = read_turn(self._encoder.decode_guarded(said, guard), self._thinks)
        calls = [
            {
                "id": f"call{number:05d}",  # nine letters and digits, as Mistral's templates require
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
            }
            for number, call in enumerate(_without(guard, written.calls))
        ]
        message: dict[str, Any] = {"role": "assistant", "content": written.content.replace(guard, "")}
        if written.reasoning is not None:
            message["reasoning_content"] = written.reasoning.replace(guard, "")
        return Parsed(
            {**message, "tool_calls": calls} if calls else message,
            [text.replace(guard, "") for text in written.malformed],
        )

    def text(self, token_ids: Ints) -> str:
        return self._encoder.decode(token_ids)

    def check(self) -> None:
        """Check that a conversation can be continued.

        Raises:
            TemplateFault: there is no safe bridge over a user's message, or the encoder's tokens differ from the
                tokenizer's.
        """
        self._following([ASKED], ())
        whole = self._render_text([ASKED, {"role": "assistant", "content": PROBE}, ASKED], (), True)
        if not whole.startswith(self._render_text([ASKED], (), True)):
            raise TemplateFault("it renders the prompt of a turn differently once the turn follows it")
        self._encoder.check(whole)

    def _following(self, messages: Messages, tools: Tools) -> tuple[TurnEnd, str, str]:
        """Return the previous turn's end, the text from its last token to the next turn's start, and its guard."""
        guard, guarded = self._encoder.guarded_messages(messages)
        history = _history(guarded)
        ended = self._render_text(history, tools, False)
        whole = self._render_text([*history, *guarded], tools, True)
        if not whole.startswith(ended):
            example = "for example because it drops the thinking of earlier turns"
            raise TemplateFault(
                f"it renders a turn of the assistant differently once other messages follow it, {example}"
            )
        ending = self._endings.get("tool_calls" in history[-1])
        if ending is None:
            raise TemplateFault(self.no_calls)
        return ending, ending.mark + ending.after + whole[len(ended) :], guard

    def _ending(self, messages: Messages, tools: Tools) -> TurnEnd:
        text = self._render_text(messages, tools, False)
        ended = text.rstrip()
        for mark in sorted(self._encoder.marks, key=len, reverse=True):
            if ended.endswith(mark) and text.rfind(PROBE) < len(ended):
                return TurnEnd(mark, text[len(ended) :])
        raise TemplateFault("it ends a turn of the assistant without a special token")

    def _moving(self) -> str | None:
        """Return why a conversation with a system message cannot be continued; None if it can, or is rejected."""
        begun = [SYSTEM, ASKED]
        try:
            later = self._render_text([*begun, {"role": "assistant", "content": PROBE}, ASKED], (), True)
            follows = later.startswith(self._render_text(begun, (), True))
        except TemplateFault:
            return None
        return (
            None
            if follows
            else "its chat template moves the system message when others follow: put its text into the user's message"
        )

    def _unreadable(self) -> str | None:
        """Return why the tool calls that the template renders cannot be parsed again; None if they can."""
        messages = [ASKED, calling([CALL, CALL])]
        opened, written = self._render_text(messages[:1], TOOLS, True), self._render_text(messages, TOOLS, False)
        turn = written[len(opened) :] if written.startswith(opened) else written[written.rfind(ASKED["content"]) :]
        found = read_turn(turn, thinks=False).calls
        return None if list(found) == [CALL, CALL] else NO_CALLS.format(f"it writes {turn!r}")


def _history(messages: Messages) -> list[Mapping[str, Any]]:
    """Return a conversation that `messages` can follow, with a tool call for each answer at their beginning."""
    answers: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] != "tool":
            break
        answers.append(message)
    return [ASKED, calling([CALL] * len(answers), answers) if answers else {"role": "assistant", "content": PROBE}]


def _without(guard: str, value: Any) -> Any:
    if isinstance(value, str):
        return value.replace(guard, "")
    if isinstance(value, Mapping):
        return {_without(guard, key): _without(guard, one) for key, one in value.items()}
    return [_without(guard, one) for one in value] if isinstance(value, list | tuple) else value


REMEDY = (
    "set data_args.template to chatml or qwen2_5 (the tokenizer must have <|im_start|> and <|im_end|>), or use another "
    "model"
)


def chat_renderer(
    tokenizer: PreTrainedTokenizerBase,
    model_path: str | Path,
    template: str,
    further: Mapping[str, Any] = NOTHING,
    pictures: tuple[str, ...] = (),
) -> SeeingRenderer:
    """Return the renderer for a model's conversations over several turns.

    Args:
        model_path: folder of the model.
        template: value of `data_args.template`.
        further: value of `data_args.chat_template_kwargs`.
        pictures: the special tokens that stand for pictures. Empty: the model sees none.

    Raises:
        BadInput: a conversation in this format cannot be continued from its tokens.
    """

    try:
        eos = tokenizer.eos_token_id
        encoder = Encoder(tokenizer, template_text(tokenizer, template), pictures)
        render = turns_renderer(tokenizer, template, further, bool(pictures))
        known = family_renderer(tokenizer, encoder, render, model_path) if template == "native" else None
        if known is not None:
            return known
        renderer = TemplateRenderer(encoder, render, eos if isinstance(eos, int) else None)
        renderer.check()
    except ValueError as error:
        problem = (
            f"the model '{model_path}' cannot play episodes of several turns with the template '{template}': {error}"
        )
        raise BadInput(Fault("environments", problem, REMEDY, "not_supported")) from error
    return renderer
