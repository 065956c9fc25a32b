"""Applies the tokenizer's own chat template, in the form in which the template reads messages.

Templates disagree on the form: most read a content as a string, some only as a list of parts; most read the arguments
of a tool call as an object, some only as JSON text; the thinking is `reasoning_content` in most, `thinking` in others.
The form is found by rendering probes: messages of words that occur in no template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import Environment
from jinja2.exceptions import TemplateError
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from roll.data.messages import REASONING, UNLEARNT
from roll.data.picture_parts import PICTURES, parts_of

Messages = Sequence[Mapping[str, Any]]
"""Messages. Each has a `role` and a `content`, both strings, and optionally keys of MORE."""
MORE = ("tool_calls", "reasoning_content", "tool_call_id", "name")
"""Optional keys of a message, for templates that use them."""
THINK, THOUGHT = "<think>", "</think>"
"""Tags around the thinking."""
OPENINGS = ("<|", "<｜")
"""Prefixes of most special tokens, including those that the tokenizer does not list as special."""
TAGS = (THINK, THOUGHT, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tags that have a meaning in the policy's own text, even if the template does not contain them."""
PROBE = "Quokka"
"""Text of the assistant's message in a probe. It marks the position of the message in the rendered text."""
ASKED: Mapping[str, Any] = {"role": "user", "content": "Wombat"}
REJECTIONS = (TemplateError, ValueError, TypeError, LookupError, AttributeError)
"""Errors of a template that cannot express the messages."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
GENERATION_TAGS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


class TemplateFault(ValueError):
    """The template rejects the messages. `str()` returns the reason."""


@dataclass(frozen=True)
class Form:
    """The form in which a template reads messages."""

    parts: bool
    """Whether contents are lists of parts, `[{"type": "text", "text": ...}]`."""
    text_arguments: bool
    """Whether the arguments of a tool call are JSON text."""
    reasoning: str | None
    """Key of the thinking; None if the template writes none."""

    def of(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as the template reads it."""
        found = {key: value for key, value in message.items() if key not in (UNLEARNT, PICTURES, *REASONING)}
        if REASONING[0] in message and self.reasoning:
            found[self.reasoning] = message[REASONING[0]]
        if message.get(PICTURES):
            found["content"] = parts_of(message["content"])
        elif self.parts:
            found["content"] = [{"type": "text", "text": message["content"]}]
        if calls := message_calls(message):
            found["tool_calls"] = [self._call(call) for call in calls]
        return found

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = function_of(call).get("arguments")
        if not self.text_arguments or isinstance(arguments, str):
            return call
        return with_arguments(call, json.dumps(arguments, ensure_ascii=False))


def message_calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the tool calls of a message. Raises TemplateFault if they are not a list of objects."""
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise TemplateFault(f"the tool_calls of a message are not a list of objects: {str(calls)[:60]}")
    return calls


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the name and arguments of a tool call: its `function`, or the call itself, as many templates do."""
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        raise TemplateFault(f"the function of a tool call is not an object: {str(function)[:60]}")
    return function


def with_arguments(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    """Return a tool call with other arguments."""
    changed = {**function_of(call), "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


PLAIN = Form(parts=False, text_arguments=False, reasoning=REASONING[0])
"""The form of most templates."""


class NativeTemplate:
    """The tokenizer's own chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @property
    def source(self) -> str:
        """Return the Jinja source. `chat_template` is a string, or a mapping of several, which are concatenated."""
        own = self._tokenizer.chat_template
        return "\n".join(own.values()) if isinstance(own, Mapping) else str(own or "")

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template, or one of several, reads and does not set itself."""
        own = self._tokenizer.chat_template
        # With the statements that transformers adds to Jinja's.
        parser = Environment(extensions=["jinja2.ext.loopcontrols"])
        sources = own.values() if isinstance(own, Mapping) else [own or ""]
        return frozenset().union(
            *(find_undeclared_variables(parser.parse(GENERATION_TAGS.sub("", source))) for source in sources)
        )

    def unread(self, further: Mapping[str, Any]) -> list[str]:
        """Return the arguments that the template does not read."""
        return [key for key in further if key not in self.variables]

    @cached_property
    def form(self) -> Form:
        """The form in which the template reads messages, found by probes."""
        said = [ASKED, {"role": "assistant", "content": PROBE}]
        parts = not self._writes(PLAIN, said) and self._writes(Form(True, False, None), said)
        thought = [ASKED, {"role": "assistant", "content": "Yes", REASONING[0]: PROBE}]
        thinking = [key for key in REASONING if self._writes(Form(parts, False, key), thought)]
        calls = [{"id": "call00000", "type": "function", "function": {"name": "feed", "arguments": {"leaf": PROBE}}}]
        calling = [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]
        as_object, as_text = (self._tried(Form(parts, is_text, None), calling) for is_text in (False, True))
        # A template that concatenates strings fails with an object, or writes it as Python does, in single quotes.
        text_arguments = PROBE in as_text and (PROBE not in as_object or f"{{'leaf': '{PROBE}'}}" in as_object)
        key = thinking[0] if thinking else (REASONING[0] if REASONING[0] in self.source else None)
        return Form(parts, text_arguments, key)

    @property
    def marks_turns(self) -> bool:
        """Whether the template marks what the assistant generates, with `{% generation %}` blocks."""
        return GENERATION.search(self.source) is not None

    def text(self, messages: Messages, generate: bool, further: Mapping[str, Any]) -> str:
        """Return the text of `messages`.

        Args:
            generate: whether to open an assistant turn at the end.
            further: additional arguments of the template, `tools` among them.

        Raises:
            TemplateFault: the template rejects the messages.
        """
        return apply_template(self._tokenizer, [self.form.of(message) for message in messages], generate, further)

    def generated(self, messages: Messages, further: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return the spans of the text of `messages` that the template marks as generated, [first, end) in characters.

        Raises:
            TemplateFault: the template rejects the messages.
        """
        arguments = {**self._tokenizer.special_tokens_map, **further}
        tools = arguments.pop("tools", None)
        try:
            source = self._tokenizer.get_chat_template(None, tools)
            # The declared return type leaves out the second value, which the mask needs.
            found: Any = render_jinja_template(
                [[self.form.of(message) for message in messages]],
                tools,
                None,
                source,
                return_assistant_tokens_mask=True,
                **arguments,
            )
        except REJECTIONS as error:
            raise TemplateFault(f"the tokenizer's chat template rejects the messages: {error}") from error
        return [(int(first), int(end)) for first, end in found[1][0]]

    def _writes(self, form: Form, messages: Messages) -> bool:
        return PROBE in self._tried(form, messages)

    def _tried(self, form: Form, messages: Messages) -> str:
        """Return the text of a probe; "" if the template rejects it."""
        try:
            return apply_template(self._tokenizer, [form.of(message) for message in messages], False, {})
        except TemplateFault:
            return ""


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    generate: bool,
    further: Mapping[str, Any],
    source: str | None = None,
) -> str:
    """Return the text of messages, which must be in the template's form.

    Args:
        further: additional arguments of the template.
        source: Jinja source; None is the tokenizer's own template.

    Raises:
        TemplateFault: the template rejects the messages.
    """
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate, chat_template=source, **further
        )
    except REJECTIONS as error:
        raise TemplateFault(f"the tokenizer's chat template rejects the messages: {error}") from error
    assert isinstance(text, str)
    return text


def special_marks(tokenizer: PreTrainedTokenizerBase, template: str) -> dict[str, int]:
    """Return the token id of each special token by its text.

    An added token counts as special if the tokenizer marks it as special, if it looks like a special token or is one of
    TAGS, or if the template contains it.
    """
    return {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.content.strip()
        and (token.special or token.content.startswith(OPENINGS) or token.content in TAGS or token.content in template)
    }


def opening(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the special tokens (BOS) that the tokenizer itself adds before a text; "" if it adds none."""
    return "".join(tokenizer.convert_ids_to_tokens(added_tokens(tokenizer)[0]))


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer itself adds before and after a text."""
    found = tokenizer("a", add_special_tokens=True, return_special_tokens_mask=True)
    whole: Any = found["input_ids"]
    mask: Any = found["special_tokens_mask"]
    if not tokenizer.is_fast:  # the mask of a tokenizer in Python may be all zeros
        plain: Any = tokenizer("a", add_special_tokens=False)["input_ids"]
        starts = range(len(whole) - len(plain) + 1)
        begin = next((number for number in starts if whole[number : number + len(plain)] == plain), 0)
        mask = [0 if begin <= number < begin + len(plain) else 1 for number in range(len(whole))]
    first = next((number for number, flag in enumerate(mask) if not flag), len(mask))
    last = next((number for number in range(len(mask), first, -1) if not mask[number - 1]), first)
    return whole[:first], whole[last:]
