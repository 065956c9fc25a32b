"""The tokens of a session: which request continues which answer, and what the engine is given for it. Without side effects on others.

A request continues the answer whose conversation its messages begin with. Its tokens are those that the engine saw and sampled up to there,
and what the new messages add to them. The first to continue an answer extends its trajectory; another one forks: a trajectory that begins
with the same tokens, given. A conversation that continues no answer is rendered, as a trajectory of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll.data.renderers.base import ChatRenderer
from roll.gateway.asked import Message
from roll.rollout.record import given, sampled
from roll.types import Completion, Ints, Segment

Tools = Sequence[Mapping[str, Any]]


@dataclass(eq=False)
class _Path:
    """One trajectory."""

    segments: list[Segment] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    """State before each sampled segment."""


@dataclass(eq=False)
class _Answered:
    """An answer that a request may continue."""

    path: _Path
    before: Ints
    """[B], tokens before the answer."""
    sampled: Ints
    """[S]"""
    is_continued: bool = False


@dataclass(eq=False)
class Opening:
    """The engine's input for a request."""

    context: Ints
    """[C]"""
    given: Ints
    """The part that is new in its trajectory, all of it for a new trajectory."""
    digest: str
    """Digest of the conversation."""
    state: str
    """Text of the messages after the continued answer."""
    continued: _Answered | None
    """The answer whose trajectory continues, None for a new trajectory."""


class Histories:
    """The trajectories of a session."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._paths: list[_Path] = []
        self._answered: dict[str, list[_Answered]] = {}

    @property
    def trajectories(self) -> list[list[Segment]]:
        """Return their segments, in the order of the trajectories' first answers."""
        return [path.segments for path in self._paths]

    @property
    def states(self) -> list[str]:
        """Return the new part before each sampled segment, trajectory by trajectory."""
        return [state for path in self._paths for state in path.states]

    def open(self, messages: Sequence[Message], inner: Sequence[Message], tools: Tools) -> Opening:
        """Return the tokens to answer. Nothing else extends the same trajectory until `lay` or `give_up`.

        Args:
            messages: as the agent has them, of which the last is not the assistant's.
            inner: the same messages with the identities of calls that the renderer gave.

        Raises:
            TemplateFault: the chat template cannot express them.
        """
        digests = conversation_digests(messages, tools)
        for length in range(len(messages) - 1, 0, -1):
            found = self._answered.get(digests[length])
            if found is None or any(message["role"] == "assistant" for message in messages[length:]):
                continue
            answered = next((one for one in found if not one.is_continued), found[0])
            bridge = self._renderer.bridge(answered.before, answered.sampled, inner[length:], tools)
            if bridge is None:
                break
            context = np.concatenate([answered.before, answered.sampled, bridge], dtype=np.int32)
            state = _text(messages[length:])
            if answered.is_continued:
                return Opening(context, context, digests[-1], state, None)
            answered.is_continued = True
            return Opening(context, bridge, digests[-1], state, answered)
        context = self._renderer.render(inner, tools)
        return Opening(context, context, digests[-1], _text(messages), None)

    def lay(self, opening: Opening, completion: Completion, answer: Message, calls: Sequence[Mapping[str, Any]]) -> None:
        """Record the given and the sampled tokens.

        Args:
            answer: the message that the agent gets.
            calls: name and arguments of the tools called in it.
        """
        if opening.continued is None:
            self._paths.append(path := _Path())
        else:
            path = opening.continued.path
        path.segments += [given(opening.given, self._renderer.text(opening.given)), sampled(completion, calls)]
        path.states.append(opening.state)
        laid = np.concatenate([segment.token_ids for segment in path.segments])
        assert np.array_equal(laid[: len(laid) - len(completion.token_ids)], opening.context), "a trajectory is not what the engine saw"
        digest = _next_digest(opening.digest, answer)
        self._answered.setdefault(digest, []).append(_Answered(path, opening.context, completion.token_ids))

    def give_up(self, opening: Opening) -> None:
        """Note that the request was not answered. Another one may continue the same answer."""
        if opening.continued is not None:
            opening.continued.is_continued = False


def conversation_digests(messages: Sequence[Message], tools: Tools) -> list[str]:
    """Return [messages + 1] digests: of no message, of the first, of the first two, ... All include the tools."""
    digests = [hashlib.sha256(_json(list(tools))).hexdigest()]
    for message in messages:
        digests.append(_next_digest(digests[-1], message))
    return digests


def _next_digest(before: str, message: Message) -> str:
    return hashlib.sha256(before.encode() + _json(_compared(message))).hexdigest()


def _compared(message: Message) -> dict[str, Any]:
    """Return a message's identity, which stays the same if an agent rewrites the message: without what the policy
    thought, blanks at the ends of its words, identities of its calls."""
    if message["role"] != "assistant":
        return {key: message.get(key) for key in ("role", "content", "tool_call_id")}
    calls = [[call["function"]["name"], json.loads(call["function"]["arguments"])] for call in message.get("tool_calls") or ()]
    return {"role": "assistant", "content": message["content"].strip(), "calls": calls}


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)
