"""Renders messages to text with a chat template. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
"""Messages. Each has a `role` and a `content`, both strings, and optionally keys of MORE."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


RenderMessages = Callable[[Messages, bool], str]
"""(messages, whether to open an assistant turn at the end) -> rendered text"""


class Render(Protocol):
    """Renders messages to text."""

    def __call__(self, messages: Messages, generate: bool, further: Mapping[str, Any] = NOTHING) -> str:
        """Return the text of `messages`.

        Args:
            generate: whether to open an assistant turn at the end.
            further: additional arguments of the chat template.
        """
        ...


MORE = ("tool_calls", "reasoning_content", "tool_call_id", "name")
"""Optional keys of a message, for templates that use them."""
WRITTEN = MORE[:2]
"""Optional keys that are part of an assistant's turn. A template that ignores such a key would leave a part of the turn out."""
QWEN2_5_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
Template = Literal["native", "chatml", "qwen2_5", "raw"]


class TemplateFault(ValueError):
    """The template rejects the messages. `str()` returns the reason."""


def renderer(template: Template, tokenizer: PreTrainedTokenizerBase) -> Render:
    """Return the function that renders messages with `template`. It raises TemplateFault for messages that the template cannot express.

    Raises:
        ValueError: `template` is `native`, but the tokenizer has no chat template.
    """
    if template == "native" and not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of '{tokenizer.name_or_path}' has no chat template of its own")
    own = {"chatml": chatml, "qwen2_5": qwen2_5, "raw": raw}
    # `chat_template` is a string, or a mapping of several by name.
    lost = {key for key in WRITTEN if template != "native" or key not in str(tokenizer.chat_template)}

    def render(messages: Messages, generate: bool, further: Mapping[str, Any] = NOTHING) -> str:
        for key in [key for message in messages for key in lost.intersection(message)]:
            raise TemplateFault(f"a message has '{key}', which the template '{template}' does not write")
        for key in further:
            if template != "native" or key not in str(tokenizer.chat_template):
                raise TemplateFault(f"the row has '{key}', which the template '{template}' does not read")
        return _native(messages, generate, tokenizer, further) if template == "native" else own[template](messages, generate)

    return render


def chatml(messages: Messages, generate: bool) -> str:
    """Render each message as `<|im_start|>role`, newline, content, `<|im_end|>`, newline."""
    turns = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return turns + ("<|im_start|>assistant\n" if generate else "")


def qwen2_5(messages: Messages, generate: bool) -> str:
    """Render ChatML, with Qwen2.5's own system message if the conversation has none."""
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": QWEN2_5_SYSTEM}, *messages]
    return chatml(messages, generate)


def raw(messages: Messages, generate: bool) -> str:
    """Render only the contents, with an empty line between them, for base models."""
    text = "\n\n".join(message["content"] for message in messages[:-1] if message["content"])
    last = messages[-1]
    if last["role"] == "assistant":
        return text + last["content"]
    return f"{text}\n\n{last['content']}" if text else last["content"]


def render_example(messages: Messages, render: RenderMessages, eos_token: str) -> tuple[str, str]:
    """Return the prompt and the response as text, for a conversation whose last message is the assistant's.

    Concatenated, the two are the whole conversation. The response ends with the template's end of a turn, or with `eos_token` if the
    template has none. White space after the end of the turn is left out, because the policy never generates it.

    Raises:
        TemplateFault: the template does not render the conversation as a continuation of its prompt.
    """
    prompt = render(messages[:-1], True)
    whole = render(messages, False)
    if not whole.startswith(prompt):
        raise TemplateFault("the template renders the prompt differently once the response follows it")
    response = whole[len(prompt) :]
    ended, content = response.rstrip(), messages[-1]["content"].strip()
    is_open = ended.endswith(content) if content else not ended
    return prompt, response + eos_token if is_open else ended


def render_turns(messages: Messages, render: RenderMessages, eos_token: str) -> list[str]:
    """Return the text in pieces: context, assistant's turn, context, assistant's turn, and so on. The last message is the assistant's.

    Concatenated, the pieces are the prompt and the response of `render_example`. The bounds of each turn are found by rendering the
    conversation up to it, without the messages that follow.

    Raises:
        TemplateFault: the template renders the beginning of the conversation differently if more messages follow.
    """
    prompt, response = render_example(messages, render, eos_token)
    pieces, begun = [], 0
    for number, message in enumerate(messages[:-1]):
        if message["role"] != "assistant":
            continue
        before, after = render(messages[:number], True), render(messages[: number + 1], False).rstrip()
        if not (prompt.startswith(before) and prompt.startswith(after) and begun <= len(before) <= len(after)):
            problem = f"the template renders the assistant's message {number + 1} of {len(messages)} differently if others follow it"
            example = "for example because it drops the thinking of earlier turns"
            raise TemplateFault(f"{problem}, {example}; the policy cannot learn such a turn: set loss_on=response")
        pieces += [prompt[begun : len(before)], prompt[len(before) : len(after)]]
        begun = len(after)
    return [*pieces, prompt[begun:], response]


def _native(messages: Messages, generate: bool, tokenizer: PreTrainedTokenizerBase, further: Mapping[str, Any]) -> str:
    conversation = [dict(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=generate, **further)
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise TemplateFault(f"the tokenizer's chat template rejects the messages: {error}") from error
    assert isinstance(text, str)
    return text
