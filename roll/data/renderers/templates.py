"""Renders messages and tools to text with a chat template: the tokenizer's own, or one of roll's.

Messages for probing a chat template. Their words occur in no template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from roll.data.chat import NOTHING, QWEN2_5_SYSTEM, check_marks
from roll.data.messages import REASONING, MessageFault, read_message
from roll.data.native import PLAIN, NativeTemplate, TemplateFault, apply_template, opening
from roll.data.picture_parts import PICTURES

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

# Qwen2.5's published template. SYSTEM stands for the system message of conversations that have none.
CHATML_TOOLS = """\
{%- set system = messages[0].content if messages[0].role == 'system' else SYSTEM %}
{%- if tools or system or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + system }}
    {%- if tools %}
        {{- '\\n\\n' if system }}
        {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
        {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
        {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
        {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' }}
        {{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
        {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>' + message.role + ('\\n' + message.content if message.content else '') }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""
OWN = {"chatml": CHATML_TOOLS.replace("SYSTEM", "''"), "qwen2_5": CHATML_TOOLS.replace("SYSTEM", repr(QWEN2_5_SYSTEM))}


class RenderTurns(Protocol):
    """Renders messages to text."""

    def __call__(self, messages: Messages, tools: Tools, generate: bool) -> str:
        """Return the text of `messages`. `generate` opens an assistant turn at the end.

        Raises:
            TemplateFault: the template rejects the messages, or would leave a part of them out.
        """
        ...


def template_text(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """Return the Jinja source of `template`. If the tokenizer has several templates by name, return all of them
    concatenated.

    Raises:
        ValueError: there is no such template, or it has no source.
    """
    if template in OWN:
        return OWN[template]
    if template != "native":
        raise ValueError(f"the template '{template}' does not mark the end of a turn")
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template of its own")
    return NativeTemplate(tokenizer).source


def turns_renderer(
    tokenizer: PreTrainedTokenizerBase, template: str, further: Mapping[str, Any] = NOTHING, sees: bool = False
) -> RenderTurns:
    """Return the function that renders messages with `template`.

    Args:
        further: additional arguments of the tokenizer's own chat template.
        sees: whether messages may show pictures.

    Raises:
        ValueError: see `template_text`; or the tokenizer lacks a mark of the template, or the template does not read an
            argument.
    """
    check_marks(template, tokenizer)
    chosen, source = OWN.get(template), template_text(tokenizer, template)
    native = NativeTemplate(tokenizer) if chosen is None else None
    if unread := list(further) if native is None else native.unread(further):
        raise ValueError(f"the template does not read '{unread[0]}' of chat_template_kwargs")
    form = native.form if native else PLAIN
    begun = "" if chosen is None else opening(tokenizer)

    def render(messages: Messages, tools: Tools, generate: bool) -> str:
        if "tool_calls" not in source and any(message.get("tool_calls") for message in messages):
            raise TemplateFault("a message has 'tool_calls', which the template does not write")
        read = [template_message(message, sees) for message in messages]
        if native is None and any(PICTURES in message for message in read):
            raise TemplateFault(f"a message shows a picture, which the template '{template}' does not write")
        conversation = [form.of(message) for message in read]
        given = {**further, "tools": [dict(tool) for tool in tools] or None}
        return begun + apply_template(tokenizer, conversation, generate, given, chosen)

    return render


def template_message(message: Mapping[str, Any], sees: bool = False) -> dict[str, Any]:
    """Return a message as templates expect it, as `read_message`, with other keys. Raises TemplateFault."""
    try:
        others = {key: value for key, value in message.items() if key not in (PICTURES, *REASONING)}
        return {**others, **read_message(message, sees)}
    except MessageFault as fault:
        raise TemplateFault(f"a message {fault}") from fault


SYSTEM: Mapping[str, Any] = {"role": "system", "content": "Be brief."}
TOOL = "wallaby"
CALL: Mapping[str, Any] = {"name": TOOL, "arguments": {"leaf": "eucalyptus", "number": 3}}
TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Feed it.",
            "parameters": {
                "type": "object",
                "properties": {"leaf": {"type": "string"}, "number": {"type": "integer"}},
                "required": ["leaf"],
            },
        },
    }
]


def calling(calls: Sequence[Mapping[str, Any]], answers: Messages = ()) -> dict[str, Any]:
    """Return an assistant's message with the given tool calls, with the ids and names in `answers`, if any."""
    named = [
        {
            "id": (answers[number].get("tool_call_id") if number < len(answers) else None) or f"call{number:05d}",
            "type": "function",
            "function": {
                **call,
                "name": (answers[number].get("name") if number < len(answers) else None) or call["name"],
            },
        }
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": named}
