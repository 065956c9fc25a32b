"""Checks requests of agents: each key is used, ignored on purpose, or refused. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from roll.gateway.asked import Message, refusal

IGNORED = frozenset(
    {
        *("frequency_penalty", "metadata", "model", "presence_penalty", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort"),
        *("safety_identifier", "seed", "service_tier", "store", "stream", "stream_options", "temperature", "top_p", "user", "verbosity"),
    }
)
"""Keys without an effect on the answer, because `generating_args` of the run decides the sampling."""
NEUTRAL: Mapping[str, tuple[Sequence[Any], str]] = {
    "n": ((1,), "ask once for each answer, with another `seed` or `user` each time"),
    "logprobs": ((False,), "leave it out; the run keeps log-probs itself"),
    "top_logprobs": ((0,), "leave it out; the run keeps log-probs itself"),
    "tool_choice": (("auto",), "leave it out, or give 'auto': the policy chooses"),
    "parallel_tool_calls": ((True,), "leave it out: the policy may call several tools at once"),
    "response_format": (({"type": "text"},), "leave it out, and say in a message which format is wanted"),
    "modalities": ((["text"],), "leave it out: the policy writes text"),
    "logit_bias": (({},), "leave it out"),
}
"""Keys that may only have these values, or null."""
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXTS = ("text", "input_text", "output_text")
"""Types of parts of a message that are text."""
MOST_MESSAGES, MOST_TOOLS, MOST_STOPS = 4096, 1024, 16


def check_keys(body: Mapping[str, Any], meant: frozenset[str], neutral: Mapping[str, tuple[Sequence[Any], str]]) -> None:
    """Raise Refused for an unknown key, and for a value of an unsupported feature."""
    for key, value in body.items():
        if key in meant or key in IGNORED or value is None:
            continue
        if key not in neutral:
            raise refusal(key, "not supported", "leave it out")
        values, remedy = neutral[key]
        if value not in values:
            raise refusal(key, f"{value!r:.80} is not supported", remedy)


def messages_of(given: Any, place: str) -> list[Message]:
    """Return normalised messages of chat completions. Raises Refused."""
    found = listed(given, place, MOST_MESSAGES)
    if not found:
        raise refusal(place, "empty", "give at least one message")
    return [_message(one, f"{place}[{number}]") for number, one in enumerate(found)]


def check_order(messages: Sequence[Message], place: str) -> None:
    """Raise Refused unless the policy may answer these messages."""
    if not messages or messages[-1]["role"] == "assistant":
        raise refusal(place, "the last message is the assistant's", "end with a message that the policy is to answer")


def tools_of(given: Any, place: str) -> list[Mapping[str, Any]]:
    """Return schemas of tools in the format of chat completions. Raises Refused."""
    return [tool_of(one, f"{place}[{number}]") for number, one in enumerate(listed(given, place, MOST_TOOLS))]


def tool_of(given: Any, place: str) -> Mapping[str, Any]:
    """Return one schema. Raises Refused."""
    function = given.get("function") if isinstance(given, Mapping) and given.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refusal(place, f"{given!r:.80} is not a function", 'give {"type": "function", "function": {"name": ..., "parameters": ...}}')
    return {"type": "function", "function": {key: function[key] for key in ("name", "description", "parameters") if key in function}}


def text_of(given: Any, place: str) -> str:
    """Return the text of a message's content: a text, null, or text parts. Raises Refused."""
    if given is None or isinstance(given, str):
        return given or ""
    parts = []
    for number, part in enumerate(listed(given, place, MOST_MESSAGES)):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXTS or not isinstance(part.get("text"), str):
            raise refusal(f"{place}[{number}]", f"a part of type {kind!r:.80} is not supported", "give text alone")
        parts.append(part["text"])
    return "".join(parts)


def call_of(identity: Any, name: Any, arguments: Any, place: str) -> dict[str, Any]:
    """Return a call in an assistant's message. Raises Refused if its arguments are not the JSON text of an object."""
    try:
        read = json.loads(arguments or "{}")
    except (TypeError, ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise refusal(f"{place}.arguments", f"{arguments!r:.80} is not the JSON text of an object", "send calls back as they came")
    if not isinstance(name, str) or not isinstance(identity, str):
        raise refusal(place, "a call without an identity or a name", "send calls back as they came")
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}


def count_of(given: Any, place: str) -> int | None:
    """Return a number of tokens. Raises Refused."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
        return given
    raise refusal(place, f"{given!r:.80} is not a number of tokens", "give a whole number above 0, or leave it out")


def flag_of(given: Any, place: str) -> bool:
    """Return True or False. Raises Refused."""
    if given is None or isinstance(given, bool):
        return bool(given)
    raise refusal(place, f"{given!r:.80} is neither true nor false", "give true or false, or leave it out")


def stops_of(given: Any, place: str) -> tuple[str, ...]:
    """Return the texts that end an answer. Raises Refused."""
    texts = [given] if isinstance(given, str) else listed(given, place, MOST_STOPS)
    if any(not isinstance(text, str) or not text for text in texts):
        raise refusal(place, f"{given!r:.80} is not a text or a list of texts", "give texts that are not empty")
    return tuple(texts)


def listed(given: Any, place: str, most: int) -> list[Any]:
    """Return a list, empty for null. Raises Refused."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise refusal(place, f"{given!r:.80} is not a list", "give a list")
    if len(given) > most:
        raise refusal(place, f"{len(given)} of them; {most} are the most", "send fewer")
    return given


def _message(given: Any, place: str) -> Message:
    role = given.get("role") if isinstance(given, Mapping) else None
    if role not in ROLES:
        raise refusal(f"{place}.role", f"{role!r:.80} is not supported", f"give one of {', '.join(ROLES)}")
    text = text_of(given.get("content"), f"{place}.content")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
    if role == "tool":
        if not isinstance(given.get("tool_call_id"), str):
            raise refusal(f"{place}.tool_call_id", "missing", "say which call the message answers")
        message["tool_call_id"] = given["tool_call_id"]
    if role == "assistant" and given.get("tool_calls"):
        message["tool_calls"] = _calls(given["tool_calls"], f"{place}.tool_calls")
    if role == "assistant" and isinstance(given.get("reasoning_content"), str):
        message["reasoning_content"] = given["reasoning_content"]
    return message


def _calls(given: Any, place: str) -> list[dict[str, Any]]:
    found = []
    for number, call in enumerate(listed(given, place, MOST_TOOLS)):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise refusal(f"{place}[{number}]", f"{call!r:.80} calls no function", "send calls back as they came")
        found.append(call_of(call.get("id"), function.get("name"), function.get("arguments"), f"{place}[{number}].function"))
    return found
