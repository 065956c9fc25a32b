"""The interface of environments, in which the policy acts turn by turn, and their registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from roll.registry import Registry

Message = Mapping[str, Any]
"""A message in OpenAI's format: `role`, `content`, `tool_calls` (arguments as JSON text), `tool_call_id`, `name`."""
TOOL_ERRORS = "tool_errors"
MalformedCalls = Literal["answer", "end", "step"]
"""Treatment of tool calls that cannot be parsed. `answer`: the model receives an error as the tool's answer, which
counts as a turn. `end`: the episode ends. `step`: the environment receives the message, with the texts of these calls
under `malformed`.
"""


@dataclass(frozen=True)
class Observation:
    """The first observation of an episode."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the environment's tools in OpenAI's format: `{"type": "function", "function": {...}}`."""
    state: str | None = None
    """Identifies the environment's state: equal strings mean equal states. If None, the text of the messages does."""


@dataclass(frozen=True)
class Ask:
    """A turn that an environment asks of a partner, another policy. No token of it is trained on."""

    partner: str
    """Name of the partner, a key of `environments.<domain>.partners`."""
    messages: Sequence[Message]
    """The conversation as the partner sees it, with its own earlier turns as those of the assistant."""


@dataclass(frozen=True)
class Step:
    """The environment's answer to a message of the policy."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    """Whether the episode ends."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Counts of this step by name, summed over the episode. TOOL_ERRORS is the number of failed tool calls."""
    state: str | None = None
    """See `Observation.state`."""
    asks: Ask | None = None
    """The turn of a partner that comes next. The environment's `hear` receives it, and returns the step that follows:
    both steps together are the answer to the policy. A step that asks does not end the episode.
    """


class Environment(Protocol):
    """The environment of one episode, created by `Class(**environment_args)`.

    The methods may be `async def`. If `reset`, `step` and all tools of the domain are `async def`, episodes of a
    process run concurrently. An environment may raise, hang or crash without harm to the run, because it runs in a
    separate process (see process.py). The class may have an attribute `malformed_calls`, one of `MalformedCalls`; the
    default is "answer".

    An environment whose steps ask partners has another method, `hear(partner: str, text: str) -> Step`, which receives
    a partner's turn. It may be `async def`, and has the deadline of a step.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begin the episode for a row. Called once. The same row and seed must produce the same initial state."""
        ...

    def step(self, message: Message) -> Step:
        """Answer a message of the policy."""
        ...

    def close(self) -> None:
        """Release what the environment holds. Called when the episode has ended."""
        ...


ENVIRONMENTS: Registry[type[Any]] = Registry("environment")
