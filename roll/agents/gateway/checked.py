"""Validates the requests of agents. Every key is used, deliberately ignored, or refused. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll.agents.gateway.asked import Message, refusal
from roll.data import messages

IGNORED = frozenset(
    {
        *(
            "frequency_penalty",
            "metadata",
            "model",
            "presence_penalty",
            "prompt_cache_key",
            "prompt_cache_retention",
            "reasoning_effort",
        ),
        *(
            "safety_identifier",
            "seed",
            "service_tier",
            "store",
            "stream",
            "stream_options",
            "temperature",
            "top_p",
            "user",
            "verbosity",
        ),
    }
)
"""Keys that are accepted but do not change the answer. The sampling settings are those of the run's `generating_args`.
"""
NEUTRAL: Mapping[str, tuple[Sequence[Any], str]] = {
    "n": ((1,), "send one request for each answer, each with a different `seed` or `user`"),
    "logprobs": ((False,), "leave it out; the run keeps log-probs itself"),
    "top_logprobs": ((0,), "leave it out; the run keeps log-probs itself"),
    "tool_choice": (("auto",), "leave it out, or give 'auto': the policy chooses"),
    "parallel_tool_calls": ((True,), "leave it out: the policy may call several tools at once"),
    "response_format": (({"type": "text"},), "leave it out, and ask for the format in a message"),
    "modalities": ((["text"],), "leave it out: the policy generates text only"),
    "logit_bias": (({},), "leave it out"),
}
"""Keys that may only have one of these values or null, with the remedy for other values."""
OVERRULED = (
    *("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "reasoning", "reasoning_effort"),
    *("thinking.budget_tokens", "output_config.effort", "verbosity"),
)
"""Settings that the run decides, so that a request's have no effect."""
ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_MESSAGES, MOST_TOOLS, MOST_STOPS = 4096, 1024, 16


def check_keys(
    body: Mapping[str, Any],
    meant: frozenset[str],
    neutral: Mapping[str, tuple[Sequence[Any], str]],
    ignored: frozenset[str] = IGNORED,
    place: str = "",
) -> None:
    """Raise Refused for an unknown key, or a value that requests an unsupported feature. Keys in `meant` are used.
    `place` is written before the keys.
    """
    for key, value in body.items():
        if key in meant or key in ignored or value is None:
            continue
        if key not in neutral:
            raise refusal(f"{place}{key}", "not supported", "leave it out", "not_supported")
        values, remedy = neutral[key]
        if value not in values:
            raise refusal(f"{place}{key}", f"{value!r:.80} is not supported", remedy, "not_supported")


def overruled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a request's settings that the run decides."""
    return {key: settings[key] for key in OVERRULED if settings.get(key) is not None}


def messages_of(given: Any, place: str) -> list[Message]:
    """Return the normalised messages of a chat completion request. Raises Refused if they are invalid."""
    found = listed(given, place, MOST_MESSAGES)
    if not found:
        raise refusal(place, "empty", "give at least one message", "empty")
    return [_message(one, f"{place}[{number}]") for number, one in enumerate(found)]


def check_order(messages: Sequence[Message], place: str) -> None:
    """Raise Refused if there are no messages, or the last one is the assistant's."""
    if not messages or messages[-1]["role"] == "assistant":
        raise refusal(
            place, "the last message is the assistant's", "end with a message for the policy to answer", "not_allowed"
        )


def tools_of(given: Any, place: str) -> list[Mapping[str, Any]]:
    """Return the schemas of tools in the format of chat completions. Raises Refused if they are invalid."""
    return [checked_tool(one, f"{place}[{number}]") for number, one in enumerate(listed(given, place, MOST_TOOLS))]


def checked_tool(given: Any, place: str) -> Mapping[str, Any]:
    """Return the schema of one tool. Raises Refused if it is invalid."""
    function = given.get("function") if isinstance(given, Mapping) and given.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refusal(
            place,
            f"{given!r:.80} is not a function",
            'give {"type": "function", "function": {"name": ..., "parameters": ...}}',
            "malformed",
        )
    return {
        "type": "function",
        "function": {key: function[key] for key in ("name", "description", "parameters") if key in function},
    }


def checked_text(given: Any, place: str) -> str:
    """Return the text of a message's content: a string, null, or a list of text parts. Raises Refused for others."""
    if given is not None and not isinstance(given, str):
        listed(given, place, MOST_MESSAGES)
    try:
        return messages.text_of(given)
    except messages.MessageFault as fault:
        raise refusal(f"{place}{fault.at}", str(fault), "send text only", fault.code) from fault


def call_of(identity: Any, name: Any, arguments: Any, place: str) -> dict[str, Any]:
    """Return a tool call of a message. Raises Refused if it is invalid or its arguments are no JSON object."""
    if not isinstance(arguments, str | None) or messages.object_of(arguments) is None:
        raise refusal(
            f"{place}.arguments",
            f"{arguments!r:.80} is not the JSON text of an object",
            "send calls back unchanged",
            "malformed",
        )
    if not isinstance(name, str) or not isinstance(identity, str):
        raise refusal(place, "the call has no id or no name", "send calls back unchanged", "missing")
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}


def count_of(given: Any, place: str) -> int | None:
    """Return a number of tokens, or None for null. Raises Refused for anything else."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
        return given
    raise refusal(
        place, f"{given!r:.80} is not a number of tokens", "give a whole number above 0, or leave it out", "wrong_type"
    )


def flag_of(given: Any, place: str) -> bool:
    """Return a boolean, False for null. Raises Refused for anything else."""
    if given is None or isinstance(given, bool):
        return bool(given)
    raise refusal(
        place, f"{given!r:.80} is neither true nor false", "give true or false, or leave it out", "wrong_type"
    )


def stops_of(given: Any, place: str) -> tuple[str, ...]:
    """Return the strings that end an answer. Raises Refused if they are invalid."""
    texts = [given] if isinstance(given, str) else listed(given, place, MOST_STOPS)
    if any(not isinstance(text, str) or not text for text in texts):
        raise refusal(
            place,
            f"{given!r:.80} is neither a string nor a list of strings",
            "give one or more non-empty strings",
            "wrong_type",
        )
    return tuple(texts)


def listed(given: Any, place: str, most: int) -> list[Any]:
    """Return a list, empty for null. Raises Refused if it is not a list or has more than `most` entries."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise refusal(place, f"{given!r:.80} is not a list", "give a list", "wrong_type")
    if len(given) > most:
        raise refusal(place, f"{len(given)} entries; at most {most} are allowed", "send fewer", "too_large")
    return given


def _message(given: Any, place: str) -> Message:
    role = given.get("role") if isinstance(given, Mapping) else None
    if role not in ROLES:
        raise refusal(
            f"{place}.role", f"{role!r:.80} is not supported", f"give one of {', '.join(ROLES)}", "not_supported"
        )
    text = checked_text(given.get("content"), f"{place}.content")
    message: dict[str, Any] = {"role": messages.ROLE_OF[role], "content": text}
    if role == "tool":
        if not isinstance(given.get("tool_call_id"), str):
            raise refusal(
                f"{place}.tool_call_id", "missing", "give the id of the call that the message answers", "missing"
            )
        message["tool_call_id"] = given["tool_call_id"]
    if role == "assistant" and given.get("tool_calls"):
        message["tool_calls"] = _calls(given["tool_calls"], f"{place}.tool_calls")
    if role == "assistant" and (thinking := _thinking(given, place)):
        message["reasoning_content"] = thinking
    return message


def _thinking(given: Mapping[str, Any], place: str) -> str:
    try:
        return messages.reasoning_of(given)
    except messages.MessageFault as fault:
        raise refusal(place, str(fault), fault.remedy, fault.code) from fault


def _calls(given: Any, place: str) -> list[dict[str, Any]]:
    found = []
    for number, call in enumerate(listed(given, place, MOST_TOOLS)):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise refusal(
                f"{place}[{number}]", f"{call!r:.80} does not call a function", "send calls back unchanged", "malformed"
            )
        found.append(
            call_of(call.get("id"), function.get("name"), function.get("arguments"), f"{place}[{number}].function")
        )
    return found
