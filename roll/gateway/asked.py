"""An agent's request and the policy's answer, independent of any API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.errors import Fault

Message = Mapping[str, Any]
"""`role`, `content` (text), of an assistant `tool_calls`, of a tool `tool_call_id`. Arguments of calls are JSON text of an object."""


class Refused(Exception):
    """A refused request, with HTTP's status."""

    def __init__(self, status: int, fault: Fault, kind: str = "invalid_request_error") -> None:
        super().__init__(f"{fault.place}: {fault.problem}; {fault.remedy}")
        self.status, self.fault, self.kind = status, fault, kind

    def body(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.fault.place, "code": None}}


@dataclass(frozen=True)
class Asked:
    """One request."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """OpenAI's schemas, as chat completions have them."""
    max_tokens: int | None = None
    """Largest number of tokens of the answer, None for the run's."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer. The answer does not include them."""


@dataclass(frozen=True)
class Answer:
    """The policy's answer."""

    identity: str
    """Identity of this answer within the session."""
    created: int
    """Seconds of Unix time."""
    message: Message
    finish: str
    """`stop`, `length` or `tool_calls`."""
    prompt_tokens: int
    completion_tokens: int


def refusal(place: str, problem: str, remedy: str, status: int = 400) -> Refused:
    """A request refused for something in its body."""
    return Refused(status, Fault(place, problem, remedy))
