"""The values that pass between an environment process and its parent: calls, and the returned values, which are
validated and whose size is limited.

The child checks a value before it sends it, and the parent checks it again, because the child is not trusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any, Literal, NamedTuple

from roll.agents.containers.container import ContainerSettings
from roll.agents.environments.base import Ask, MalformedCalls, Message, Observation, Step
from roll.agents.environments.picture_contents import BLIND, file_in, file_of, file_part, is_shown
from roll.agents.tool_failures import ToolFailure
from roll.data.messages import ROLE_OF, MessageFault, text_of
from roll.data.picture_parts import PictureFault
from roll.errors import EnvironmentFailed
from roll.hosted.protocol import Assignment, Garbled, Reply, framed, text_in
from roll.hosted.raised import NOTE_CHARACTERS, TRACE_CHARACTERS
from roll.types import FP32_MAX

Method = Literal["reset", "step", "hear", "close"]
REASONS: dict[str, Literal["crashed", "timed_out"]] = {"crashed": "crashed", "timed_out": "timed_out"}
MALFORMED: tuple[MalformedCalls, ...] = ("answer", "end", "step")
MOST_MESSAGES, MOST_TOOLS, MOST_METRICS = 256, 256, 64
"""Largest number of messages, tools and metrics in one returned value."""
MOST_NAME = 100
"""Largest number of characters in the name of a metric."""
MOST_STATE = 1 << 16
"""Largest number of characters of a state."""
TOOL_FAILURES = "tool_failures"
MOST_FAILURES = 64
"""Largest number of failures of tools in one reply."""
MOST_REPLY = 4 << 20
"""Largest size of a returned value as JSON, in bytes, without its pictures."""
MOST_SHOWN = 32 << 20
"""Largest size of the files of all pictures in a returned value, in bytes."""


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
class EnvironmentAssignment(Assignment):
    """The environment and the tools of a child."""

    environment: str
    environment_args: Mapping[str, Any]
    tools: tuple[str, ...]
    mcp: tuple[McpServer, ...]
    containers: ContainerSettings = field(default_factory=ContainerSettings)
    partners: tuple[str, ...] = ()
    """Names of the partners that the environment may ask."""
    sees: bool = False
    """Whether the policy sees pictures."""


class Call(NamedTuple):
    """A call of one method of one session's environment."""

    number: int
    seal: int
    session: int
    method: Method
    given: tuple[Any, ...]


class BadReturn(ValueError):
    """An environment returned an invalid value. `str()` gives the reason."""


ReadPicture = Callable[[Any], bytes]
"""Returns the bytes of the file of a picture in a content. Raises PictureFault."""


def no_picture(_: Any) -> bytes:
    """Refuse any picture. Implements `ReadPicture` for policies that see none."""
    raise PictureFault(BLIND, code="not_supported")


def reader(sees: bool) -> ReadPicture:
    """Return what reads the pictures that an environment shows to a policy that `sees` them, or does not."""
    return file_of if sees else no_picture


def observation_of(returned: Any, read: ReadPicture) -> Observation:
    """Convert the value that `reset` returned to plain values. Raise BadReturn if it is invalid."""
    if not isinstance(returned, Observation):
        raise BadReturn(f"reset returned a {type(returned).__name__}, not an Observation")
    if not returned.messages:
        raise BadReturn("the Observation has no messages")
    return Observation(_messages(returned.messages, read), _tools(returned.tools), _state(returned.state))


def step_of(returned: Any, read: ReadPicture) -> Step:
    """Convert the value that `step` returned to plain values. Raise BadReturn if it is invalid."""
    if not isinstance(returned, Step):
        raise BadReturn(f"step returned a {type(returned).__name__}, not a Step")
    metrics = returned.metrics
    if not isinstance(metrics, Mapping) or len(metrics) > MOST_METRICS or any(not _is_name(name) for name in metrics):
        raise BadReturn(
            f"the Step's metrics must map at most {MOST_METRICS} names of at most {MOST_NAME} characters to numbers"
        )
    counted = {str(name): _number(f"its metric '{name}'", value) for name, value in metrics.items()}
    reward = _number("its reward", returned.reward)
    if not isinstance(returned.done, bool):
        raise BadReturn(f"the Step's done is {returned.done!r:.80}, not True or False")
    asks = _ask(returned.asks)
    if asks is not None and returned.done:
        raise BadReturn(f"the Step asks the partner '{asks.partner}', and is done: nobody would hear the answer")
    return Step(_messages(returned.messages, read), reward, returned.done, counted, _state(returned.state), asks)


def json_of(checked: Observation | Step) -> str:
    """Encode a checked value as JSON. Raise BadReturn if it is too large."""
    text, kind = json.dumps(asdict(checked)), type(checked).__name__
    shown = sum(len(part.get("base64", "")) for message in checked.messages for part in _parts(message))
    if shown * 3 // 4 > MOST_SHOWN:
        raise BadReturn(f"the pictures of the {kind} have {shown * 3 // 4} bytes; at most {MOST_SHOWN} are allowed")
    if len(text) - shown > MOST_REPLY:
        raise BadReturn(f"the {kind} has {len(text) - shown} bytes as JSON; at most {MOST_REPLY} are allowed")
    return text


def _parts(message: Message) -> Sequence[Mapping[str, Any]]:
    """Return the parts of a checked message with pictures; none of others."""
    return content if isinstance(content := message.get("content"), list) else ()


def observation_from(said: Any) -> Observation:
    """Rebuild an observation from the decoded JSON of `json_of`. Raise BadReturn or TypeError if it is invalid."""
    return observation_of(Observation(**said), file_in)


def step_from(said: Any) -> Step:
    """Rebuild a step from the decoded JSON of `json_of`. Raise BadReturn or TypeError if it is invalid."""
    asks = said["asks"]
    return step_of(Step(**said | {"asks": None if asks is None else Ask(**asks)}), file_in)


def _ask(asks: Any) -> Ask | None:
    if asks is None:
        return None
    if not isinstance(asks, Ask) or not _is_name(asks.partner):
        raise BadReturn(f"the Step's asks is {asks!r:.80}, not an Ask with the name of a partner")
    messages = _messages(asks.messages, _unseen)
    if not messages or any(not isinstance(message.get("content"), str) for message in messages):
        raise BadReturn(f"the partner '{asks.partner}' needs at least one message, and each must have a text")
    return Ask(asks.partner, messages)


def _unseen(_: Any) -> bytes:
    raise PictureFault("is shown to a partner, and partners see none", code="not_supported")


def _messages(messages: Any, read: ReadPicture) -> list[dict[str, Any]]:
    return [_message(one, read) for one in _listed("messages", messages, MOST_MESSAGES)]


def _message(message: Any, read: ReadPicture) -> dict[str, Any]:
    if not isinstance(message, Mapping) or message.get("role") not in ROLE_OF:
        raise BadReturn(f"a message must be a mapping with a role of {', '.join(ROLE_OF)}, but is {message!r:.80}")
    role, content = ROLE_OF[message["role"]], message.get("content")
    try:
        if isinstance(content, list | tuple) and any(map(is_shown, content)):
            said: Any = _shown_content(content, role, read)
        else:
            said = content if isinstance(content, str | None) else text_of(content)
    except MessageFault as fault:
        raise BadReturn(f"the content of a message must be text, or a list of texts: it {fault}") from fault
    return _plain("a message", {**message, "role": role, **({} if "content" not in message else {"content": said})})


def _shown_content(content: Sequence[Any], role: str, read: ReadPicture) -> list[Mapping[str, Any]]:
    """Return the parts of a content with pictures, whose files they have. Raises BadReturn or MessageFault."""
    if role == "assistant":
        raise BadReturn("a message of the assistant shows a picture, and models write only text")
    parts = []
    for number, part in enumerate(content):
        try:
            parts.append(file_part(read(part)) if is_shown(part) else {"type": "text", "text": text_of([part])})
        except PictureFault as fault:
            raise BadReturn(f"part {number} of a message {_told(fault)}") from fault
    return parts


def _told(fault: PictureFault) -> str:
    return str(fault) if str(fault) == BLIND else f"is a picture that {fault}; {fault.remedy}"


def _tools(tools: Any) -> list[dict[str, Any]]:
    found = [_plain("a tool", tool) for tool in _listed("tools", tools, MOST_TOOLS)]
    for tool in found:
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise BadReturn(f'a tool must be {{"type": "function", "function": {{...}}}}, but is {tool!r:.80}')
        if not isinstance(tool["function"].get("name"), str):
            raise BadReturn(f"a tool's function has no name: {tool!r:.80}")
    return found


def _listed(what: str, values: Any, most: int) -> Sequence[Any]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise BadReturn(f"its {what} are a {type(values).__name__}, not a list")
    if len(values) > most:
        raise BadReturn(f"it has {len(values)} {what}; at most {most} are allowed")
    return values


def _plain(what: str, value: Any) -> Any:
    """Return a copy that consists of plain values. Raise BadReturn if JSON cannot express the value."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadReturn(f"{what} must consist of text, numbers, lists and mappings: {error}") from error


def _state(state: Any) -> str | None:
    if state is not None and (not isinstance(state, str) or len(state) > MOST_STATE):
        raise BadReturn(f"its state must be a text of at most {MOST_STATE} characters, but is {state!r:.80}")
    return state


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= MOST_NAME


def _number(what: str, value: Any) -> float:
    if isinstance(value, Real) and math.isfinite(number := float(value)) and abs(number) <= FP32_MAX:
        return number
    raise BadReturn(f"{what} is {value!r:.80}, not a finite number in the range of fp32")


@dataclass(frozen=True)
class ToldStep(Step):
    """A step, with the failures of tools during it that are the first of their kind in the process."""

    tool_failures: tuple[ToolFailure, ...] = ()


def returned_message(
    call: Call, returned: Observation | Step | None, tool_failures: Sequence[ToolFailure] = ()
) -> bytes:
    """Encode a checked return value as the child sends it. Raises BadReturn if the value is too large."""
    said = "null" if returned is None else json_of(returned)
    remark = json.dumps({TOOL_FAILURES: tool_failures}) if tool_failures else "null"
    return framed(f"[{call.number},{call.seal},{said},{remark}]".encode())


def failed_message(call: Call, failed: EnvironmentFailed) -> bytes:
    """Encode a failure as the child sends it."""
    return framed(json.dumps([call.number, call.seal, None, [failed.why[:NOTE_CHARACTERS], failed.reason]]).encode())


def read_malformed_calls(said: Any) -> MalformedCalls:
    """Decode the traits of a child. Raises ValueError if they are malformed."""
    if said not in MALFORMED:
        raise ValueError("malformed_calls")
    return said


def outcome_of(method: Method, reply: Reply) -> Observation | Step | EnvironmentFailed | None:
    """Decode a reply: what the method returned, or how the call failed. Raises Garbled if it is malformed."""
    try:
        remark = reply.remark
        if remark is not None and not isinstance(remark, dict):
            why, reason = remark
            return EnvironmentFailed(text_in(why)[:NOTE_CHARACTERS], REASONS[reason])
        returned = {"reset": observation_from, "step": step_from, "hear": step_from, "close": lambda _: None}[method](
            reply.returned
        )
        return returned if remark is None else _told_step(returned, remark)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise Garbled(f"a reply is malformed: {error}") from error


def _told_step(returned: Observation | Step | None, remark: Mapping[str, Any]) -> Observation | Step | None:
    """Return a step with the failures of tools in a reply. Raises ValueError or KeyError if it is malformed."""
    told = remark[TOOL_FAILURES]
    if len(told) > MOST_FAILURES:
        raise ValueError(TOOL_FAILURES)
    failures = tuple(ToolFailure(*(text_in(text)[:TRACE_CHARACTERS] for text in texts)) for texts in told)
    return ToldStep(**vars(returned), tool_failures=failures) if isinstance(returned, Step) else returned


def late(method: Method, given: Sequence[Any], seconds: float) -> EnvironmentFailed:
    """Return the error of a call that exceeded its deadline, with the tools that the message to a step calls."""
    calls = (given[0].get("tool_calls") or ()) if method == "step" else ()
    names = ", ".join(dict.fromkeys(f"'{call['function']['name']}'" for call in calls))
    called = f", in which the policy called {names}" if names else ""
    return EnvironmentFailed(f"{method} did not end within step_timeout, {seconds:g} s{called}", "timed_out")
