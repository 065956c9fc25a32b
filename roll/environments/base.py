"""What an environment is: a world in which the policy acts, turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Message = Mapping[str, Any]
"""As OpenAI's API has it: `role`, `content` (text), `tool_calls`, `tool_call_id`, `name`; a call's arguments are JSON text."""
MalformedCalls = Literal["answer", "end", "step"]


@dataclass(frozen=True)
class Observation:
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    state: str | None = None


@dataclass(frozen=True)
class Step:
    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: str | None = None


class Environment(Protocol):
    def reset(self, row: Mapping[str, Any], seed: int) -> Observation: ...
    def step(self, message: Message) -> Step: ...
    def close(self) -> None: ...
