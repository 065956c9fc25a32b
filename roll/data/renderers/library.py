"""Renderer for the model families that the library `renderers` supports.

The library reimplements published chat templates. It is used only if some trial conversations give the same tokens with
the library and with the model's own template. The template renders whole conversations; the library continues
conversations and parses turns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from renderers import ParsedToolCall, Renderer, RendererConfig, ToolCallParseStatus, create_renderer
from transformers import PreTrainedTokenizerBase

from roll.data.native import ASKED, PROBE, TemplateFault
from roll.data.renderers.base import Parsed
from roll.data.renderers.calls import is_call
from roll.data.renderers.encoding import Encoder, ints, render_tokens
from roll.data.renderers.probes import CALL, SYSTEM, TOOL, TOOLS, calling
from roll.data.renderers.templates import Messages, RenderTurns, Tools, template_message
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
    """A `ChatRenderer` that uses the library. The policy's thinking in earlier turns is kept."""

    def __init__(self, encoder: Encoder, render: RenderTurns, library: Renderer) -> None:
        self._encoder, self._render_text, self._library = encoder, render, library
        self._opened = self.render([ASKED], ()).tolist()
        self.stop_token_ids = frozenset(library.get_stop_token_ids())

    def render(self, messages: Messages, tools: Tools) -> Ints:
        """See `ChatRenderer`."""
        return render_tokens(self._encoder, self._render_text, messages, tools)

    def bridge(self, before: Ints, sampled: Ints, messages: Messages, tools: Tools) -> Ints | None:
        """See `ChatRenderer`. Return None also if the library would change sampled tokens."""
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
        """See `ChatRenderer`."""
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
        """See `ChatRenderer`."""
        return self._encoder.decode(token_ids)

    def follows(self) -> bool:
        """Whether library and template render the trials to the same tokens, and the library can parse the template's
        tool calls.
        """
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
