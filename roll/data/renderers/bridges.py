"""Renders and continues conversations with any chat template that allows it.

Nothing is known about the template except the text it produces. To find the bridge, the tokens that continue a sampled
turn, a probe conversation is rendered in which the assistant's message is a word that occurs nowhere else. The bridge
is the text after that word, up to and including the start of the next assistant turn. It is safe if the template
renders earlier messages in the same way when others follow, and ends a turn with a special token:

    <|im_start|>user\\nprobe<|im_end|>\\n<|im_start|>assistant\\nprobe<|im_end|>\\n<|im_start|>user\\nnew<|im_end|>\\n<|im_start|>assistant\\n
                                                                  └─────────────────────── bridge
                                                                      ───────────────────────────┘
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll.data.native import ASKED, PROBE, THINK, THOUGHT, TemplateFault
from roll.data.renderers.base import Parsed
from roll.data.renderers.calls import read_turn
from roll.data.renderers.encoding import Encoder, guard_for, ints, render_tokens
from roll.data.renderers.probes import CALL, SYSTEM, TOOLS, calling
from roll.data.renderers.templates import Messages, RenderTurns, Tools
from roll.types import Ints

NO_CALLS = 'its chat template does not write tool calls as <tool_call>{{"name": ..., "arguments": ...}}</tool_call>: {}'


@dataclass(frozen=True)
class TurnEnd:
    """The template's end of an assistant's turn."""

    mark: str
    """Special token that ends the turn. The policy samples it last."""
    after: str
    """White space that the template writes after the mark."""


class TemplateRenderer:
    """A `ChatRenderer` for a chat template. `check` raises if conversations in its format cannot be continued."""

    def __init__(self, encoder: Encoder, render: RenderTurns, eos_token_id: int | None) -> None:
        """
        Raises:
            TemplateFault: the template cannot render a conversation, or ends a turn without a special token.
        """
        self._encoder, self._render_text = encoder, render
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
        self.stop_token_ids = frozenset(marks if eos_token_id is None else {*marks, eos_token_id})

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
        return render_tokens(self._encoder, self._render_text, messages, tools)

    def bridge(self, before: Ints, sampled: Ints, messages: Messages, tools: Tools) -> Ints | None:
        """See `ChatRenderer`. Return None also if the template rejects the messages."""
        if not messages or any(message["role"] == "assistant" for message in messages):
            return None
        try:
            ending, text, guard = self._following(messages, tools)
            ids = self._encoder.encode(text, guard, first=False)
        except TemplateFault:
            return None
        assert ids[0] == self._encoder.marks[ending.mark]
        closed = len(sampled) > 0 and int(sampled[-1]) in self._closing
        return ints(ids[1:] if closed else ids)

    def parse(self, sampled: Ints, tools: Tools) -> Parsed:
        """See `ChatRenderer`. A tag that is a special token counts only if the token itself was sampled, not the same
        text.
        """
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
        """See `ChatRenderer`."""
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
        """Return the end of the previous turn, the text from its last token to the start of the next turn, and that
        text's guard.
        """
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
        """Return why a conversation with a system message cannot be continued; None if it can, or if the template
        rejects it.
        """
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
    """Return a conversation that `messages` can follow. It has a tool call for each tool answer at the beginning of
    `messages`.
    """
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
