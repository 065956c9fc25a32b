"""An agent's request and the policy's answer, independent of the API that the agent uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.errors import Fault, FaultCode

Message = Mapping[str, Any]
"""`role` and `content` (text). An assistant message may also have `tool_calls`, and a tool message has `tool_call_id`.
The arguments of a call are a JSON object as text.
"""


class RequestRefused(Exception):
    """A refused request, with the HTTP status of its response."""

    def __init__(self, status: int, fault: Fault, kind: str = "invalid_request_error") -> None:
        super().__init__(f"{fault.place}: {fault.problem}; {fault.remedy}")
        self.status, self.fault, self.kind = status, fault, kind

    def body(self) -> dict[str, Any]:
        """Return the body of the response in the error format of OpenAI's API."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.fault.place, "code": None}}


@dataclass(frozen=True)
class AgentRequest:
    """A request of an agent."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools in the format of chat completions."""
    max_tokens: int | None = None
    """Largest number of tokens of the answer. None means the limit of the run."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer. The answer does not include them."""
    overruled: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the request has and the run decides, by place."""


@dataclass(frozen=True)
class PolicyAnswer:
    """The policy's answer."""

    identity: str
    created: int
    """Unix time in seconds."""
    message: Message
    finish: str
    """`stop`, `length` or `tool_calls`."""
    prompt_tokens: int
    completion_tokens: int
    stop_text: str | None = None
    """The stop string of the request that ended the answer, if one did."""
    cached_tokens: int = 0
    """Number of the prompt's tokens that the engine had in its prefix cache."""


def refusal(place: str, problem: str, remedy: str, code: FaultCode, status: int = 400) -> RequestRefused:
    """Return the refusal of a request because of something in its body."""
    return RequestRefused(status, Fault(place, problem, remedy, code))
