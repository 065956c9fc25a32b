"""The one reading of a message, in whatever public format it is written. Pure functions.

Data, the gateway and environments read messages with these functions. The formats are OpenAI's (old and new),
ShareGPT's (`from` and `value`), and the variants of other frameworks. A normalised message has a `role` of ROLES, a
`content` that is text, and optionally `tool_calls` whose arguments are objects, `reasoning_content`, `tool_call_id`,
`name`, and `train: False` if it must not be learnt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from roll.data.json_text import parsed
from roll.data.picture_parts import MARK, PICTURES, PictureFault, PictureReference, is_picture, reference_of
from roll.errors import FaultCode

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of the thinking of a message. A normalised message has the first one; templates read one of them."""
UNLEARNT = "train"
"""Key of an assistant's message that is False if the message must not be learnt. No template sees it."""
ROLES = ("system", "user", "assistant", "tool")
ROLE_OF: Mapping[str, str] = {**{role: role for role in ROLES}, "developer": "system", "function": "tool"}
"""Role by the value of `role`: also OpenAI's other names."""
ROLE_FROM: Mapping[str, str] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Role by the value of ShareGPT's `from`."""
TEXTS = ("text", "input_text", "output_text")
"""Types of parts of a content that contain text."""
LEARNT = (UNLEARNT, "weight", "loss", "loss_weight", "loss_scale", "trainable", "step_loss_mask")
"""Keys of OpenAI, axolotl, ms-swift, LLaMA-Factory and slime: 1 or true if a message is learnt, else 0 or false."""
OTHER_LOSS = ("mask", "masked", "loss_mask", "train_detail", "training_detail")
"""Keys by which other frameworks learn parts of a message."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
KNOWN = frozenset({"role", "content", "from", "value", "tool_calls", "function_call", "tool_call_id", "name", *LEARNT})
OTHER_ARGUMENTS = ("parameters", "input", "args", "kwargs")
"""Keys by which other formats name the arguments of a tool call."""
CALLS_REMEDY = (
    'make it {"function": {"name": ..., "arguments": {...}}}; the arguments are an object, or the JSON text of one'
)


class MessageFault(ValueError):
    """A message that cannot be read. `str()` continues the name of the message."""

    def __init__(self, reason: str, problem: str, remedy: str = "", at: str = "", *, code: FaultCode) -> None:
        super().__init__(problem)
        self.reason = reason
        """A short description without values."""
        self.remedy = remedy
        """What to do. Empty: write the message in the usual format."""
        self.at = at
        """Index of the faulty part of a content, `[1]`; or empty."""
        self.code: FaultCode = code


def read_message(message: Mapping[str, Any], sees: bool = False) -> dict[str, Any]:
    """Return a message in the normalised form. A message without text has the content "".

    Args:
        sees: whether the message may show pictures. Its text then has `MARK` for each, and its `PICTURES` say where
            they are; None for a part that does not say.

    Raises:
        MessageFault: the role is unknown, the content is not text, a tool call or the thinking cannot be read, a key
            asks for a loss that cannot be given, or there is a picture that may not be shown.
    """
    role, content, calls = _text_parts(message)
    if seen := [key for key in MEDIA if message.get(key)]:
        raise _media(f"has '{seen[0]}'")
    text, shown = shown_text(content, role) if sees else (text_of(content), ())
    read: dict[str, Any] = {"role": role, "content": text} | ({PICTURES: shown} if shown else {})
    if calls := calls or _calls(message):
        read["tool_calls"] = calls
    if role == "assistant" and (thinking := reasoning_of(message)):
        read[REASONING[0]] = thinking
    read |= {key: message[key] for key in ("tool_call_id", "name") if message.get(key)}
    learnt = _is_learnt(message)
    if learnt and role != "assistant":
        key = next(key for key in LEARNT if message.get(key))
        remedy = f"remove '{key}' from it, or make it 0 or false: only messages of the assistant are learnt"
        raise MessageFault(
            "a loss on a message that is not the assistant's",
            f"has the role '{role}' and '{key}': {message[key]!r}",
            remedy,
            code="not_supported",
        )
    return read | ({UNLEARNT: False} if learnt is False and role == "assistant" else {})


def unread_message_keys(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a message that have a value but that nothing reads."""
    role, _, _ = _text_parts(message)
    for key, value in message.items():
        if key not in KNOWN and not (key in REASONING and role == "assistant") and value not in (None, "", [], {}):
            yield key


def role_of(message: Mapping[str, Any]) -> str:
    """Return the role of a message. Raises MessageFault if it is unknown."""
    return _text_parts(message)[0]


def text_of(content: Any) -> str:
    """Return the text of a content: a string, null, or text parts, which are joined. Raises MessageFault for others."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise MessageFault(
            "malformed message", f"has a {type(content).__name__} as content: {content!r:.60}", code="wrong_type"
        )
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind.startswith(("image", "video", "audio", "input_image", "input_audio")):
            raise _media(f"has a part of the type '{kind}'", f"[{number}]")
        if isinstance(part, Mapping) and kind in TEXTS and isinstance(text := part.get("text", part.get("value")), str):
            parts.append(text)
            continue
        problem = f"has a list as content, whose part {number} is not a text: {part!r:.60}"
        raise MessageFault(
            "malformed message",
            problem,
            'make each part {"type": "text", "text": ...}',
            f"[{number}]",
            code="wrong_type",
        )
    return "".join(parts)


def shown_text(content: Any, role: str) -> tuple[str, tuple[PictureReference | None, ...]]:
    """Return the text of a content that may show pictures, with `MARK` for each, and where they are. Raises
    MessageFault for any other content, and for a picture in a message of the assistant.
    """
    parts = content if isinstance(content, list) else []
    nothing = {"type": TEXTS[0], "text": ""}
    if MARK in text_of([nothing if is_picture(part) else part for part in parts] if parts else content):
        problem = f"has the character U+{ord(MARK):04X} in its text, which Unicode reserves for internal use"
        raise MessageFault("a reserved character", problem, "remove it from the text", code="not_allowed")
    shown = tuple(_reference(part, number, role) for number, part in enumerate(parts) if is_picture(part))
    if not shown:
        return text_of(content), ()
    return "".join(MARK if is_picture(part) else text_of([part]) for part in parts), shown


def _reference(part: Any, number: int, role: str) -> PictureReference | None:
    if role == "assistant":
        problem, remedy = "shows a picture, and models write only text", "move it into a message of the user"
        raise MessageFault("a picture of the assistant", problem, remedy, f"[{number}]", code="not_allowed")
    try:
        return reference_of(part)
    except PictureFault as fault:
        problem = f"has a picture that {fault}"
        raise MessageFault("unreadable picture", problem, fault.remedy, f"[{number}]", code=fault.code) from fault


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the thinking of a message, which may have one of several keys; "" without thinking.

    Raises:
        MessageFault: the thinking is not text, or two keys have different ones.
    """
    found = {key: message[key] for key in REASONING if message.get(key)}
    for key, value in found.items():
        if not isinstance(value, str):
            raise MessageFault(
                "malformed message",
                f"has a {type(value).__name__} as '{key}': {value!r:.60}",
                f"make '{key}' a text",
                code="wrong_type",
            )
    if len(set(found.values())) > 1:
        raise MessageFault(
            "two different thoughts",
            f"has different texts in {' and '.join(found)}",
            "keep one of the two keys",
            code="contradiction",
        )
    return next(iter(found.values()), "")


def object_of(arguments: Any) -> dict[str, Any] | None:
    """Return the arguments of a tool call, an object or the JSON text of one; none are an empty object. Return None for
    anything else.

    NaN and Infinity are not JSON: a policy that writes them makes a malformed call.
    """
    try:
        found = (
            (parsed(arguments) if arguments.strip() else {})
            if isinstance(arguments, str)
            else {}
            if arguments is None
            else arguments
        )
        json.dumps(found, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return dict(found) if isinstance(found, Mapping) else None


def _text_parts(message: Mapping[str, Any]) -> tuple[str, Any, list[dict[str, Any]]]:
    """Return the role, the content, and the tool calls of ShareGPT's `function_call`, which are its text."""
    if "role" not in message and "from" in message:
        role, content = ROLE_FROM.get(str(message["from"])), _content(message, "value", "content")
        if role is None:
            raise MessageFault(
                "malformed message",
                f"is from {message['from']!r:.60}",
                f"use one of: {', '.join(ROLE_FROM)}",
                code="not_allowed",
            )
        if message["from"] == "function_call":
            return role, "", _listed_calls(content, "a function_call")
        return role, content, []
    given = message.get("role")
    role = ROLE_OF.get(given) if isinstance(given, str) else None
    if role is None:
        raise MessageFault("malformed message", f"has the role {given!r:.60}", code="not_allowed")
    return role, _content(message, "content", "value"), []


def _content(message: Mapping[str, Any], usual: str, other: str) -> Any:
    """Return the content of a message, which some rows have under the other format's key."""
    if None not in (message.get(usual), message.get(other)) and message[usual] != message[other]:
        raise MessageFault(
            "malformed message",
            f"has different texts in '{usual}' and '{other}'",
            "keep one of the two keys",
            code="contradiction",
        )
    return message[usual] if message.get(usual) is not None else message.get(other)


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = _listed_calls(message["tool_calls"], "tool_calls") if message.get("tool_calls") else []
    if not message.get("function_call"):
        return calls
    called = _listed_calls(message["function_call"], "a function_call")
    if calls and [call["function"] for call in calls] != [call["function"] for call in called]:
        raise MessageFault(
            "malformed message",
            "has different calls in tool_calls and function_call",
            "keep one of the two keys",
            code="contradiction",
        )
    return calls or called


def _listed_calls(given: Any, what: str) -> list[dict[str, Any]]:
    """Return tool calls from a list of them, a single one, or the JSON text of either."""
    found = given
    if isinstance(given, str):
        try:
            found = parsed(given)
        except (ValueError, RecursionError) as error:
            raise MessageFault(
                "malformed tool call",
                f"has {what} that is not JSON ({error}): {given!r:.60}",
                CALLS_REMEDY,
                code="malformed",
            ) from error
    if isinstance(found, Mapping):
        found = [found]
    if not isinstance(found, list):
        raise MessageFault(
            "malformed tool call",
            f"has {what} that is not a list of objects: {given!r:.60}",
            CALLS_REMEDY,
            code="wrong_type",
        )
    return [_call(call, number) for number, call in enumerate(found)]


def _call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise MessageFault(
            "malformed tool call",
            f"has the tool call {number} without the name of a function: {call!r:.60}",
            CALLS_REMEDY,
            code="missing",
        )
    arguments = object_of(function.get("arguments"))
    if arguments is None:
        problem = f"has the tool call {number} with arguments that are no JSON object: {function['arguments']!r:.60}"
        raise MessageFault("malformed tool call", problem, CALLS_REMEDY, code="malformed")
    if function.get("arguments") is None and (
        others := [key for key in OTHER_ARGUMENTS if function.get(key) is not None]
    ):
        raise MessageFault(
            "malformed tool call",
            f"has the tool call {number} with '{others[0]}' but without arguments",
            CALLS_REMEDY,
            code="missing",
        )
    named = {**function, "arguments": arguments}
    if "function" in call:
        return {**call, "function": named}
    outer = ("id", "type")
    return {
        **{key: call[key] for key in outer if key in call},
        "type": "function",
        "function": {key: value for key, value in named.items() if key not in outer},
    }


def _is_learnt(message: Mapping[str, Any]) -> bool | None:
    """Return whether the keys of a message say that it is learnt; None if it has no such key."""
    said: dict[str, bool] = {}
    for key in LEARNT:
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            problem = f"has '{key}': {value!r:.60}"
            raise MessageFault(
                f"'{key}' is neither 0 nor 1",
                problem,
                f"make '{key}' 1 (learn the message) or 0; shares are not supported",
                code="not_allowed",
            )
        said[key] = bool(value)
    for key in OTHER_LOSS:
        if message.get(key) is not None:
            remedy = f"remove it, or write which messages are learnt as '{UNLEARNT}': true or false"
            raise MessageFault(
                f"'{key}' is not supported",
                f"has '{key}', which changes what another framework learns",
                remedy,
                code="not_supported",
            )
    if len(set(said.values())) > 1:
        raise MessageFault(
            "two different weights",
            f"has {' and '.join(said)}, which contradict each other",
            "keep one of the two keys",
            code="contradiction",
        )
    return next(iter(said.values()), None)


def _media(problem: str, at: str = "") -> MessageFault:
    remedy = (
        "remove such rows, or describe the content in words; the pipelines sft, dpo, reward_model and rlvr read "
        "pictures as parts of a content if the model sees them (Qwen3.5 and Gemma 3: with model_args.sees_pictures: "
        "true)"
    )
    return MessageFault(
        "images, video or audio",
        f"{problem}: training on images, video and audio is not supported here",
        remedy,
        at,
        code="not_supported",
    )
