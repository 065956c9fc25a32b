"""Renders and continues conversations by any chat template that allows it.

Nothing is known of the template but what it writes. A conversation is rendered whose assistant says a word that occurs nowhere else; what
follows that word up to the opened next turn is the bridge. It is safe where the template writes what came before in the same way when
more follows, and ends a turn with a special token:

    <|im_start|>user\\nprobe<|im_end|>\\n<|im_start|>assistant\\nprobe<|im_end|>\\n<|im_start|>user\\nnew<|im_end|>\\n<|im_start|>assistant\\n
                                                                  └─────────────────────── bridge ───────────────────────────┘
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll.data.chat import TemplateFault
from roll.data.renderers.base import Parsed
from roll.data.renderers.calls import THINK, THOUGHT, read_turn
from roll.data.renderers.encoding import Encoder, guard_for, ints, render_tokens
from roll.data.renderers.probes import ASKED, CALL, PROBE, SYSTEM, TOOLS, calling
from roll.data.renderers.templates import Messages, RenderTurns, Tools
from roll.types import Ints

NO_CALLS = 'its chat template does not write tool calls as <tool_call>{{"name": ..., "arguments": ...}}</tool_call>: {}'


@dataclass(frozen=True)
class Ending:
    """The template's end of an assistant's turn."""

    mark: str
    """Special token that the policy samples last."""
    after: str
    """Blanks after it."""


class TemplateRenderer:
    """A `ChatRenderer` for a chat template. `check` says whether the template allows it."""

    def __init__(self, encoder: Encoder, render: RenderTurns, eos_token_id: int | None) -> None:
        """Raises TemplateFault if the template cannot render a conversation, or marks no end of a turn."""
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
            TemplateFault: the template refuses the messages, or there are tools and its calls cannot be read.
        """
        if tools and self.no_calls:
            raise TemplateFault(self.no_calls)
        if self._no_system and any(message["role"] == "system" for message in messages):
            raise TemplateFault(self._no_system)
        return render_tokens(self._encoder, self._render_text, messages, tools)

    def bridge(self, before: Ints, sampled: Ints, messages: Messages, tools: Tools) -> Ints | None:
        """See `ChatRenderer`. None also if the template refuses these messages."""
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
        """See `ChatRenderer`. A tag that is a special token only counts if that token was sampled."""
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
        return Parsed({**message, "tool_calls": calls} if calls else message, [text.replace(guard, "") for text in written.malformed])

    def text(self, token_ids: Ints) -> str:
        """See `ChatRenderer`."""
        return self._encoder.decode(token_ids)

    def check(self) -> None:
        """Raise TemplateFault if no bridge over a user's message is safe, or the tokens differ from those of the tokenizer itself."""
        self._following([ASKED], ())
        whole = self._render_text([ASKED, {"role": "assistant", "content": PROBE}, ASKED], (), True)
        if not whole.startswith(self._render_text([ASKED], (), True)):
            raise TemplateFault("it writes the prompt of a turn differently once the turn follows it")
        self._encoder.check(whole)

    def _following(self, messages: Messages, tools: Tools) -> tuple[Ending, str, str]:
        """Return (end of the previous turn, text from its last token to the opened next turn, guard in that text)."""
        guard, guarded = self._encoder.guarded_messages(messages)
        history = _history(guarded)
        ended = self._render_text(history, tools, False)
        whole = self._render_text([*history, *guarded], tools, True)
        if not whole.startswith(ended):
            raise TemplateFault("it writes a turn of the assistant differently once more follows it (as one that drops earlier thinking)")
        ending = self._endings.get("tool_calls" in history[-1])
        if ending is None:
            raise TemplateFault(self.no_calls)
        return ending, ending.mark + ending.after + whole[len(ended) :], guard

    def _ending(self, messages: Messages, tools: Tools) -> Ending:
        text = self._render_text(messages, tools, False)
        ended = text.rstrip()
        for mark in sorted(self._encoder.marks, key=len, reverse=True):
            if ended.endswith(mark) and text.rfind(PROBE) < len(ended):
                return Ending(mark, text[len(ended) :])
        raise TemplateFault("it ends a turn of the assistant without a special token")

    def _moving(self) -> str | None:
        """Return why a conversation with a system message cannot be continued. None if it can, or if the template refuses it."""
        begun = [SYSTEM, ASKED]
        try:
            later = self._render_text([*begun, {"role": "assistant", "content": PROBE}, ASKED], (), True)
            follows = later.startswith(self._render_text(begun, (), True))
        except TemplateFault:
            return None
        return None if follows else "its chat template moves the system message when more follows: tell it in the user's message"

    def _unreadable(self) -> str | None:
        """Return why the template's calls cannot be read back, None if they can."""
        messages = [ASKED, calling([CALL, CALL])]
        opened, written = self._render_text(messages[:1], TOOLS, True), self._render_text(messages, TOOLS, False)
        turn = written[len(opened) :] if written.startswith(opened) else written[written.rfind(ASKED["content"]) :]
        found = read_turn(turn, thinks=False).calls
        return None if list(found) == [CALL, CALL] else NO_CALLS.format(f"it writes {turn!r}")


def _history(messages: Messages) -> list[Mapping[str, Any]]:
    """Return a conversation that `messages` may follow, with a call for each tool answer among them."""
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
