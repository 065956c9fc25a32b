"""The interface of environments, in which the policy acts turn by turn. They are found by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from roll.registry import Registry

Message = Mapping[str, Any]
"""Message in the form of OpenAI's API: `role`, `content` (text), `tool_calls`, `tool_call_id`, `name`; a call's arguments are JSON text."""
TOOL_ERRORS = "tool_errors"
MalformedCalls = Literal["answer", "end", "step"]
"""Treatment of unreadable tool calls. `answer`: the model gets an error as a tool's answer, which is a turn. `end`: the episode
ends. `step`: the environment gets the message, with the texts of the calls under `malformed`."""


@dataclass(frozen=True)
class Observation:
    """The first observation of the policy."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """OpenAI's schemas: `{"type": "function", "function": {...}}`."""
    state: str | None = None
    """Names the state of the world: equal texts are equal states. None: the text of the messages does."""


@dataclass(frozen=True)
class Step:
    """The environment's answer to a message of the policy."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    """Reward of this turn."""
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Counts of this step, summed over an episode. TOOL_ERRORS are failed calls of tools."""
    state: str | None = None
    """See `Observation.state`."""


class Environment(Protocol):
    """One episode's world, made by `Class(**environment_args)`. Its methods may be coroutines; those run side by side in a process.

    It may raise, hang or crash: it runs in a process of its own (see process.py). A class attribute `malformed_calls`, one of
    `MalformedCalls`, is "answer" if there is none.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begin the episode of a row. Called once; equal rows and seeds give equal worlds."""
        ...

    def step(self, message: Message) -> Step:
        """Answer a message of the policy."""
        ...

    def close(self) -> None:
        """The episode has ended."""
        ...


ENVIRONMENTS: Registry[type[Any]] = Registry("environment")
