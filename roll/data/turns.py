"""Finds the assistant's turns in the text of a conversation, whatever the chat template. Pure functions of a renderer.

Nothing is known about a template except the text it produces. Templates may render a turn differently once others
follow it: without its thinking, or with another end. Therefore each turn is taken from a rendering in which it is the
last one, and the text between two turns from a rendering in which each earlier turn is replaced by a word that occurs
nowhere else:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nQuokka0<|im_end|>\\n<|im_start|>user\\nSure?<|im_end|>\\n<|im_start|>assistant\\n
                                                                └──────────────────────── context
                                                                    ─────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from typing import Any

from roll.data.messages import REASONING, UNLEARNT
from roll.data.native import (
    ASKED,
    PROBE,
    TAGS,
    THINK,
    THOUGHT,
    Messages,
    TemplateFault,
    function_of,
    message_calls,
    with_arguments,
)

RenderMessages = Callable[[Messages, bool], str]
"""(messages, whether to open an assistant turn at the end) -> rendered text"""
ANSWERED: Mapping[str, Any] = {"role": "tool", "content": "Fed."}
"""A tool's answer that follows a conversation, to find the end of a tool call."""


@dataclass(frozen=True)
class RenderedTurn:
    """An assistant's turn, and the prompt that it continues."""

    prompt: str
    """Text before the turn, with the start of the turn that the policy does not generate."""
    text: str
    """Text of the turn, with everything that the template writes after it."""
    first: int | None
    """Index of the turn's text in the rendering of the whole; None if the text was not taken from there as it is."""


class Turns:
    """The turns of the assistant in one conversation."""

    def __init__(self, messages: Messages, render: RenderMessages, marks: Collection[str] = ()) -> None:
        """`messages` end with the assistant's; `marks` are the tokenizer's special tokens, which may end a turn.

        A first message of the assistant that is not learnt is no turn: nothing opens it, and it is context as it is.
        """
        self.messages, self.render = messages, render
        spoken = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        self.numbers = [number for number in spoken if number or number == spoken[-1] or is_learnt(messages[0])]
        self._word = unused_word(render(messages, False) + str([message["content"] for message in messages]))
        self._probed = [self._probe(number, message) for number, message in enumerate(messages)]
        self._marks = sorted(set(marks) - set(TAGS), key=len, reverse=True)
        self._opened: dict[int, str] = {}
        self._told: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def opened(self, turn: int) -> str:
        """Return a turn's prompt, with a word in place of each earlier turn. `len(self)` is the turn after the last."""
        if turn not in self._opened:
            self._opened[turn] = self.render(self._before(turn), True)
        return self._opened[turn]

    def as_last(self, turn: int) -> RenderedTurn:
        """Return a turn rendered as the last one. Raises TemplateFault if the prompt differs once the turn follows."""
        *before, message = self.until(turn)
        return self.split(before, self.opened(turn), self.render([*before, message], False), message)

    def split(self, before: Messages, prompt: str, whole: str, message: Mapping[str, Any]) -> RenderedTurn:
        """Split the text `whole` of a conversation that ends with `message` into the prompt and the message's turn.

        A prompt may open the thinking. If `message` has thinking, the turn continues that prompt, as it does when the
        policy generates. If it has none, prompt and turn are what the template renders, and the prompt ends where the
        two differ.

        Raises:
            TemplateFault: the template renders the prompt differently once the turn follows it.
        """
        if whole.startswith(prompt):
            return RenderedTurn(prompt, whole[len(prompt) :], len(prompt))
        shared = self._shared(prompt, whole)
        if len(shared) < len(self._shared(self.render(before, False), prompt)):
            raise TemplateFault("the template renders the prompt differently once the response follows it")
        rest, thinking = prompt[len(shared) :], inline(message)
        if thinking is None:
            return RenderedTurn(shared, whole[len(shared) :], len(shared))
        if not rest.strip():  # the row's thinking lacks only the white space that the prompt ends with
            return RenderedTurn(prompt, whole[len(shared) :].lstrip(), None)
        if not rest.strip().endswith(THINK):
            return RenderedTurn(shared, whole[len(shared) :], len(shared))
        answer = thinking.rpartition(THOUGHT)[2].strip()
        at = whole.rfind(answer)
        if at < len(shared):
            raise TemplateFault("the template opens the thinking, and does not write the answer after it")
        return RenderedTurn(
            prompt, thinking.lstrip().removeprefix(THINK).lstrip("\n").rstrip() + whole[at + len(answer) :], None
        )

    def until(self, turn: int) -> list[Mapping[str, Any]]:
        """Return the messages up to a turn, with a word in place of each earlier turn."""
        return [*self._before(turn), self.messages[self.numbers[turn]]]

    def text_before(self, turn: int) -> str:
        """Return the text of the conversation up to a turn, with a word in place of it and of each earlier turn."""
        if turn not in self._told:
            self._told[turn] = self.render(self._before(turn + 1, whole=False), False)
        return self._told[turn]

    def last_ending(self, text: str, eos_token: str) -> str:
        """Return the last turn's text with its end: the template's; or the special token that begins the next message;
        or `eos_token`.

        Raises:
            TemplateFault: the template opens a further turn after the last message, so that the end of the last turn
                cannot be told.
        """
        turn = len(self) - 1
        tail = self._after(turn, self.text_before(turn)).rstrip()
        if self._is_closed(tail):
            self._check_no_header()
            return text.rstrip()
        try:
            following = self._answered()
        except TemplateFault:  # no message may follow, so that none can begin with the end of this turn
            following = ""
        mark = self._leading_mark(following.removeprefix(tail)) if following.startswith(tail) else ""
        return text.rstrip() + mark if mark else text + eos_token

    def ending(self, turn: int, text: str) -> tuple[str, str]:
        """Return the text of a turn that others follow with its end, and the text from there to the start of the next
        turn.

        A turn may end with a special token that begins the next message (`<|user|>`). It is part of the turn, because
        the policy generates it and stops. White space after the end is not. A turn has no end if the template writes
        one only after the last turn.

        Raises:
            TemplateFault: the end of the turn differs if others follow, and not only in its last special token.
        """
        tail, following = self._after(turn, self.text_before(turn)).rstrip(), self._after(turn, self.opened(turn + 1))
        if following.startswith(tail):
            mark = "" if self._is_closed(tail) else self._leading_mark(following[len(tail) :])
            return text.rstrip() + mark, following[len(tail) + len(mark) :]
        self._check_no_header()
        shared = self._shared(tail, following)
        kept = shared.rstrip() if self._shares_end else shared
        mark = "" if self._shares_end else self._own_mark(following[len(kept) :], self.messages[self.numbers[turn] + 1])
        if not text.rstrip().endswith(tail[len(kept) :]):
            raise self._differs(turn)
        return text.rstrip().removesuffix(tail[len(kept) :]) + mark, following[len(kept) + len(mark) :]

    def check_context(self, turn: int, prompt: str, following: str) -> None:
        """Check that the context of a turn stays as it is once others follow, and that the turn does not change what
        follows it.

        Args:
            prompt: that of `spoken`.
            following: text between the end of the turn and the start of the next one; see `ending`.

        Raises:
            TemplateFault: one of the two is not so, or the white space around the turn differs.
        """
        later_messages = self.messages[self.numbers[turn] + 1 : self.numbers[turn + 1]]
        if not self.render([*self.until(turn), *later_messages], True).endswith(following):
            raise self._differs(turn)
        first, later = prompt, self.opened(turn + 1)
        if turn:
            first, later = self._after(turn - 1, first), self._after(turn - 1, later)
        later = later[: self._index(turn, later)]
        last = (self._after(turn - 1, self.text_before(turn)) if turn else self.text_before(turn)).partition(
            self._name(turn)
        )[0]
        if later == last:
            return
        header = self._header(turn)
        if not later.startswith(first) and (len(first) - len(self._shared(first, later)) > len(header) or not header):
            raise self._differs(turn)
        if "".join(later.split()) == "".join(last.split()):
            raise self._differs(turn)

    def _is_closed(self, tail: str) -> bool:
        """Whether the text after a last turn, without white space at its end, ends the turn. The text after a tool call
        may only end that.

        A template that writes no end after a plain answer writes none after a tool call either.
        """
        plain = self._plain_tail.rstrip()
        return bool(plain) and (tail.endswith(plain) or any(tail.endswith(mark) for mark in self._marks))

    def _check_no_header(self) -> None:
        """Raise TemplateFault if the template opens a turn after the last message although none is asked for."""
        always = self.render(self._plain, True).startswith(self.render(self._plain, False).rstrip())
        if always and self._shares_end and not self._plain_following.startswith(self._plain_tail.rstrip()):
            raise TemplateFault(
                "the template opens a turn after the last message, so that the end of the last turn cannot be told"
            )

    @cached_property
    def _shares_end(self) -> bool:
        """Whether a turn that others follow begins its end in the same way as the last one."""
        return bool(self._shared(self._plain_tail, self._plain_following).strip())

    @cached_property
    def _plain_following(self) -> str:
        text = self.render([*self._plain, ASKED], True)
        return text[text.rfind(self._name(0)) + len(self._name(0)) :]

    @cached_property
    def _plain(self) -> list[Mapping[str, Any]]:
        """A conversation that ends with an answer without tool calls."""
        return [*self._before(0), {"role": "assistant", "content": self._name(0)}]

    @cached_property
    def _plain_tail(self) -> str:
        text = self.render(self._plain, False)
        return text[text.rfind(self._name(0)) + len(self._name(0)) :]

    def _answered(self) -> str:
        """Return the text after the last turn's word if a user or the called tools answer it."""
        turn = len(self) - 1
        calls = message_calls(self.messages[self.numbers[turn]])
        answers = [
            {**ANSWERED, "tool_call_id": call.get("id"), "name": function_of(call).get("name")} for call in calls
        ]
        return self._after(turn, self.render([*self._before(turn + 1, whole=False), *(answers or [ASKED])], True))

    def _header(self, turn: int) -> str:
        """Return the start of a turn that the prompt adds to its context."""
        prompt = self.opened(turn)
        return prompt[len(self._shared(self.render(self._before(turn), False), prompt)) :]

    def _before(self, turn: int, whole: bool = True) -> list[Mapping[str, Any]]:
        """Return the messages before a turn, earlier turns as their words; up to the previous turn if not `whole`."""
        if not whole:
            return self._probed[: self.numbers[turn - 1] + 1]
        return self._probed[: self.numbers[turn] if turn < len(self) else len(self._probed)]

    def _name(self, turn: int) -> str:
        return f"{self._word}{turn}x"

    def _probe(self, number: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a turn's message with a word as its content, or as the argument of its tool calls."""
        if number not in self.numbers:
            return message
        word = self._name(self.numbers.index(number))
        if not message_calls(message):
            return {"role": "assistant", "content": word}
        calls = [with_arguments(call, {"leaf": word}) for call in message_calls(message)]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def _index(self, turn: int, text: str) -> int:
        """Return the index of a turn's word in a text. Raises TemplateFault if it is not there."""
        at = text.find(self._name(turn))
        if at < 0:
            raise self._differs(turn)
        return at

    def _after(self, turn: int, text: str) -> str:
        self._index(turn, text)
        return text.rpartition(self._name(turn))[2]

    def _shared(self, one: str, other: str) -> str:
        """Return the longest beginning that two texts share and that breaks no special token and no tag."""
        length = len(commonprefix([one, other]))
        for text in (one, other):
            for mark in (*self._marks, *TAGS):
                at = text.find(mark, max(0, length - len(mark) + 1), length + len(mark) - 1)
                if 0 <= at < length:
                    length = at
        return one[:length]

    def _leading_mark(self, text: str) -> str:
        """Return the special token that begins a text, with the white space before it; "" if there is none."""
        begun = text.lstrip()
        mark = next((mark for mark in self._marks if begun.startswith(mark)), "")
        return text[: len(text) - len(begun)] + mark if mark else ""

    def _own_mark(self, text: str, following: Mapping[str, Any]) -> str:
        """Return the special token that begins a text; "" if it begins the next message, with text or role after it."""
        mark = self._leading_mark(text)
        rest = text[len(mark) :].lstrip()
        return "" if rest.startswith((str(following["content"]).strip(), str(following["role"]))) else mark

    def _differs(self, turn: int) -> TemplateFault:
        place = f"the assistant's message {self.numbers[turn] + 1} of {len(self.messages)}"
        problem = f"the template renders {place} differently if others follow it, and not only its thinking or its end"
        return TemplateFault(f"{problem}; the policy cannot learn such a turn: set loss_on=response")


def inline(message: Mapping[str, Any]) -> str | None:
    """Return a message's text with its thinking in tags; None if it has no thinking."""
    if reasoning := message.get(REASONING[0]):
        return f"{THINK}\n{str(reasoning).strip()}\n{THOUGHT}\n\n{message['content']}"
    return message["content"] if THOUGHT in message["content"] else None


def unused_word(text: str) -> str:
    """Return a word that does not occur in a text."""
    word = PROBE
    while word in text:
        word += PROBE
    return word


def is_learnt(message: Mapping[str, Any]) -> bool:
    """Whether a message is an assistant's that is to be learnt."""
    return message["role"] == "assistant" and message.get(UNLEARNT) is not False


def marked_pieces(text: str, first: int, spans: Sequence[tuple[int, int]]) -> list[str]:
    """Split a turn's text into pieces that are not learnt and pieces that are, alternating, by the spans that the
    template marks.

    The end of the turn is always learnt, because a policy that does not learn it never stops.

    Args:
        first: index of the text in the rendering that the spans refer to.
        spans: [first, end) of each marked span, in characters, in order.

    Raises:
        TemplateFault: no span marks a part of the text.
    """
    end = first + len(text)
    inside = [(max(one, first) - first, min(other, end) - first) for one, other in spans if one < end and other > first]
    if not inside:
        raise TemplateFault(
            "the template's {% generation %} blocks mark nothing of an assistant's turn; give it `train: false`"
        )
    inside[-1] = (inside[-1][0], len(text))
    pieces, at = [], 0
    for begun, ended in inside:
        pieces += [text[at:begun], text[begun:ended]]
        at = ended
    return pieces
