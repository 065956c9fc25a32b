"""The token histories of a session: which answer a request continues, and the engine's input for the request.

A request continues an earlier answer if its messages begin with the conversation up to and including that answer. The engine's input is
then the tokens that the engine read and sampled for that answer, followed by the tokens of the new messages. The first request that
continues an answer extends the answer's trajectory. A later one forks it: it starts a new trajectory with the same tokens, which count as
given. A request that continues no answer is rendered from its messages, and starts a new trajectory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll.agents.gateway.asked import Message
from roll.data.renderers.base import ChatRenderer
from roll.rollout.record import given, sampled
from roll.types import Completion, Ints, Segment

Tools = Sequence[Mapping[str, Any]]


@dataclass(eq=False)
class _Path:
    """One trajectory."""

    segments: list[Segment] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    """Text of the new messages before each sampled segment."""


@dataclass(eq=False)
class _Answered:
    """An answer that a request may continue."""

    path: _Path
    before: Ints
    """[B], tokens before the answer."""
    sampled: Ints
    """[S], tokens of the answer."""
    is_continued: bool = False
    """Whether a request has continued the trajectory from this answer."""


@dataclass(eq=False)
class Opening:
    """The engine's input for a request."""

    context: Ints
    """[C], all tokens of the input."""
    given: Ints
    """The tokens of `context` that are new in the trajectory; all of them for a new trajectory."""
    digest: str
    """Digest of the conversation."""
    state: str
    """Text of the messages after the continued answer; of all messages if no answer is continued."""
    continued: _Answered | None
    """The answer whose trajectory the request extends. None for a new trajectory."""


class Histories:
    """The trajectories of a session."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._paths: list[_Path] = []
        self._answered: dict[str, list[_Answered]] = {}

    @property
    def trajectories(self) -> list[list[Segment]]:
        """Return the segments of each trajectory, in the order of the trajectories' first answers."""
        return [path.segments for path in self._paths]

    @property
    def states(self) -> list[str]:
        """Return the text of the new messages before each sampled segment, trajectory by trajectory."""
        return [state for path in self._paths for state in path.states]

    def open(self, messages: Sequence[Message], inner: Sequence[Message], tools: Tools) -> Opening:
        """Return the engine's input for a request. Until `lay` or `give_up`, no other request extends the same trajectory.

        Args:
            messages: the request's messages as the agent sent them. The last one is not the assistant's.
            inner: the same messages, with the call ids that the renderer assigned.

        Raises:
            TemplateFault: the chat template cannot express the messages.
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
        """Record the given and the sampled tokens of an answered request.

        Args:
            answer: the message that the agent receives.
            calls: the tool calls in the message, with name and arguments.
        """
        if opening.continued is None:
            self._paths.append(path := _Path())
        else:
            path = opening.continued.path
        path.segments += [given(opening.given, self._renderer.text(opening.given)), sampled(completion, calls)]
        path.states.append(opening.state)
        laid = np.concatenate([segment.token_ids for segment in path.segments])
        assert np.array_equal(laid[: len(laid) - len(completion.token_ids)], opening.context), "a trajectory is not the engine's input"
        digest = _next_digest(opening.digest, answer)
        self._answered.setdefault(digest, []).append(_Answered(path, opening.context, completion.token_ids))

    def give_up(self, opening: Opening) -> None:
        """Record that the request was not answered, so that another one may extend the same trajectory."""
        if opening.continued is not None:
            opening.continued.is_continued = False


def conversation_digests(messages: Sequence[Message], tools: Tools) -> list[str]:
    """Return the digests of all prefixes of a conversation: of no message, of the first, of the first two, and so on.

    There are [messages + 1] of them. All depend on the tools too.
    """
    digests = [hashlib.sha256(_json(list(tools))).hexdigest()]
    for message in messages:
        digests.append(_next_digest(digests[-1], message))
    return digests


def _next_digest(before: str, message: Message) -> str:
    return hashlib.sha256(before.encode() + _json(_compared(message))).hexdigest()


def _compared(message: Message) -> dict[str, Any]:
    """Return the parts of a message that identify it. They do not change if an agent drops the policy's reasoning, strips white space
    around its text, or changes the ids of its calls."""
    if message["role"] != "assistant":
        return {key: message.get(key) for key in ("role", "content", "tool_call_id")}
    calls = [[call["function"]["name"], json.loads(call["function"]["arguments"])] for call in message.get("tool_calls") or ()]
    return {"role": "assistant", "content": message["content"].strip(), "calls": calls}


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)
