"""Messages between an environment process and its parent, each preceded by its length (roll/hosted/frames.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from roll.agents.environments.base import MalformedCalls, Observation, Step
from roll.agents.environments.checked import json_of, observation_from, step_from
from roll.errors import EnvironmentFailed, Fault
from roll.hosted.frames import Garbled, framed, garbled_text
from roll.hosted.raised import NOTE_CHARACTERS

Method = Literal["reset", "step", "close"]
REASONS: dict[str, Literal["crashed", "timed_out"]] = {"crashed": "crashed", "timed_out": "timed_out"}


class McpServer(NamedTuple):
    """A server of the Model Context Protocol, given by a command or a URL."""

    command: tuple[str, ...]
    """Command that starts the server; empty if it has a URL."""
    url: str | None
    call_timeout: float
    """Deadline of one tool call in seconds."""

    def __str__(self) -> str:
        return f"the MCP server {self.url or ' '.join(self.command)}"


@dataclass(frozen=True)
class EnvironmentAssignment:
    """The first message to a child: its environment, its tools and its limits."""

    domain: str
    environment: str
    environment_args: Mapping[str, Any]
    tools: tuple[str, ...]
    mcp: tuple[McpServer, ...]
    step_timeout: float
    """Deadline of each call in seconds. The parent enforces it for all calls, and the child too for asynchronous ones.
    """
    memory_bytes: int
    """Largest number of bytes that the process may allocate."""


@dataclass(frozen=True)
class EnvironmentReady:
    """A child's first message, before any call."""

    faults: tuple[Fault, ...]
    """Faults of the configuration. If there are any, the process ends."""
    side_by_side: bool = False
    """Whether calls run concurrently, and the child itself ends those that exceed the deadline. Otherwise it makes one
    call at a time.
    """
    malformed_calls: MalformedCalls = "answer"


class Call(NamedTuple):
    """A call of one method of one session's environment."""

    number: int
    seal: int
    session: int
    method: Method
    given: tuple[Any, ...]


class EnvironmentReply(NamedTuple):
    """The outcome of a call."""

    number: int
    seal: int
    returned: Any
    """Encoded return value of the method; `value_of` decodes it."""
    failed: EnvironmentFailed | None


def environment_ready_message(ready: EnvironmentReady) -> bytes:
    """Encode `Ready` as the child sends it."""
    faults = [[fault.place, fault.problem, fault.remedy] for fault in ready.faults]
    return framed(json.dumps([faults, ready.side_by_side, ready.malformed_calls]).encode())


def returned_message(call: Call, returned: Observation | Step | None) -> bytes:
    """Encode a checked return value as the child sends it. Raises BadReturn if the value is too large."""
    said = "null" if returned is None else json_of(returned)
    return framed(f"[{call.number},{call.seal},{said},null]".encode())


def failed_message(call: Call, failed: EnvironmentFailed) -> bytes:
    """Encode a failure as the child sends it."""
    return framed(json.dumps([call.number, call.seal, None, [failed.why[:NOTE_CHARACTERS], failed.reason]]).encode())


def read_environment_ready(body: bytes) -> EnvironmentReady:
    """Decode the `Ready` of a child. Raises Garbled if it is malformed."""
    try:
        faults, side_by_side, malformed_calls = json.loads(body)
        found = tuple(Fault(*map(_text, fault)) for fault in faults)
    except (ValueError, TypeError, RecursionError) as error:
        raise Garbled(garbled_text(body)) from error
    if type(side_by_side) is bool and malformed_calls in ("answer", "end", "step"):
        return EnvironmentReady(found, side_by_side, malformed_calls)
    raise Garbled(garbled_text(body))


def read_environment_reply(body: bytes) -> EnvironmentReply:
    """Decode a reply, except its returned value. Raises Garbled if it is malformed."""
    try:
        number, seal, returned, failed = json.loads(body)
        broke = None if failed is None else EnvironmentFailed(_text(failed[0])[:NOTE_CHARACTERS], REASONS[failed[1]])
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise Garbled(garbled_text(body)) from error
    if type(number) is int and type(seal) is int:
        return EnvironmentReply(number, seal, returned, broke)
    raise Garbled(garbled_text(body))


def returned_value(method: Method, returned: Any) -> Observation | Step | None:
    """Decode the returned value of a reply. Raises Garbled if it is malformed."""
    try:
        return {"reset": observation_from, "step": step_from, "close": lambda _: None}[method](returned)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Garbled(f"a reply is malformed: {error}") from error


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("text")
    return value
