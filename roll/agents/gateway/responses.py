"""OpenAI's responses API: parses requests and builds responses. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from roll.agents.gateway.asked import AgentRequest, Message, PolicyAnswer, refusal
from roll.agents.gateway.checked import (
    MOST_MESSAGES,
    MOST_TOOLS,
    NEUTRAL,
    ROLES,
    call_of,
    check_keys,
    check_order,
    checked_text,
    checked_tool,
    count_of,
    listed,
    overruled,
)

MEANT = frozenset({"input", "instructions", "tools", "max_output_tokens", "previous_response_id"})
RESPONSES_NEUTRAL = {
    **{key: NEUTRAL[key] for key in ("tool_choice", "parallel_tool_calls", "top_logprobs")},
    "background": ((False,), "leave it out, and wait for the answer"),
    "include": (([], ["reasoning.encrypted_content"]), "leave it out"),
    "text": (({}, {"format": {"type": "text"}}), "leave it out, and ask for the format in the input"),
    "truncation": (("disabled",), "leave it out: the policy sees the whole input"),
}
WITHOUT_EFFECT = frozenset({"reasoning"})
Item = Mapping[str, Any]


def read_response(body: Mapping[str, Any], earlier: Mapping[str, Sequence[Message]]) -> AgentRequest:
    """Parse the body of a request.

    Args:
        earlier: the conversation, without instructions, up to each response of the session, by the response's id.

    Raises:
        Refused: the request is invalid or not supported.
    """
    check_keys(body, MEANT | WITHOUT_EFFECT, RESPONSES_NEUTRAL)
    messages = request_conversation(body, earlier)
    check_order(messages, "input")
    if instructions := checked_text(body.get("instructions"), "instructions"):
        messages = [{"role": "system", "content": instructions}, *messages]
    tools = [
        _tool(one, f"tools[{number}]") for number, one in enumerate(listed(body.get("tools"), "tools", MOST_TOOLS))
    ]
    most = count_of(body.get("max_output_tokens"), "max_output_tokens")
    return AgentRequest(messages, tools, most, overruled=overruled(body))


def request_conversation(body: Mapping[str, Any], earlier: Mapping[str, Sequence[Message]]) -> list[Message]:
    """Return the conversation of a request without its instructions: the messages up to `previous_response_id`, then
    those of the input.

    Raises Refused if a message is invalid, or if the session has no response with that id.
    """
    before: Sequence[Message] = ()
    if (previous := body.get("previous_response_id")) is not None:
        if not isinstance(previous, str) or previous not in earlier:
            raise refusal(
                "previous_response_id",
                f"{previous!r:.80} is not a response of this session",
                "send the whole input instead",
                "not_found",
            )
        before = earlier[previous]
    given = body.get("input")
    new = (
        [{"role": "user", "content": given}]
        if isinstance(given, str)
        else _messages(listed(given, "input", MOST_MESSAGES))
    )
    return [*before, *new]


def output_items(answer: PolicyAnswer) -> list[dict[str, Any]]:
    """Return the policy's message and tool calls as output items."""
    items: list[dict[str, Any]] = []
    calls = answer.message.get("tool_calls") or ()
    if answer.message["content"] or not calls:
        part = {"type": "output_text", "text": answer.message["content"], "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"msg_{answer.identity}",
                "type": "message",
                "status": _status(answer),
                "role": "assistant",
                "content": [part],
            }
        )
    for number, call in enumerate(calls):
        named = {"call_id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        items.append({"id": f"fc_{answer.identity}_{number}", "type": "function_call", "status": "completed", **named})
    return items


def response_body(answer: PolicyAnswer, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a complete response. If the response is streamed, its last event contains this body."""
    usage = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    cut = {"reason": "max_output_tokens"} if answer.finish == "length" else None
    return {
        **_head(answer, model, body),
        "status": _status(answer),
        "incomplete_details": cut,
        "output": output_items(answer),
        "usage": usage,
    }


def response_events(answer: PolicyAnswer, model: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed response."""
    for number, event in enumerate(_events(answer, model, body)):
        yield {**event, "sequence_number": number}


def _events(answer: PolicyAnswer, model: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {
        **_head(answer, model, body),
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(output_items(answer)):
        yield from (_message_events if item["type"] == "message" else _call_events)(index, item)
    kind = "response.incomplete" if answer.finish == "length" else "response.completed"
    yield {"type": kind, "response": response_body(answer, model, body)}


def _message_events(index: int, item: Item) -> Iterator[dict[str, Any]]:
    [part] = item["content"]
    place = {"item_id": item["id"], "output_index": index, "content_index": 0}
    yield {
        "type": "response.output_item.added",
        "output_index": index,
        "item": {**item, "status": "in_progress", "content": []},
    }
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    yield {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []}
    yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _call_events(index: int, item: Item) -> Iterator[dict[str, Any]]:
    place = {"item_id": item["id"], "output_index": index}
    yield {
        "type": "response.output_item.added",
        "output_index": index,
        "item": {**item, "status": "in_progress", "arguments": ""},
    }
    yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
    yield {
        "type": "response.function_call_arguments.done",
        **place,
        "name": item["name"],
        "arguments": item["arguments"],
    }
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _messages(items: Sequence[Any]) -> list[Message]:
    """Return the messages of input items, without reasoning. Calls join the assistant's message before them."""
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        place = f"input[{number}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        is_said = bool(messages) and messages[-1]["role"] == "assistant"
        if kind == "message":
            messages.append(_message(item, place))
        elif kind == "function_call":
            call = call_of(item.get("call_id"), item.get("name"), item.get("arguments"), place)
            if not is_said:
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise refusal(f"{place}.call_id", "missing", "give the id of the call that the item answers", "missing")
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item["call_id"],
                    "content": checked_text(item.get("output"), f"{place}.output"),
                }
            )
        elif kind != "reasoning":
            raise refusal(
                f"{place}.type",
                f"{kind!r:.80} is not supported",
                "give messages, function calls and their outputs",
                "not_supported",
            )
    return list(messages)


def _message(item: Item, place: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ROLES or role == "tool":
        raise refusal(
            f"{place}.role",
            f"{role!r:.80} is not supported",
            "give one of system, developer, user, assistant",
            "not_supported",
        )
    return {
        "role": "system" if role == "developer" else role,
        "content": checked_text(item.get("content"), f"{place}.content"),
    }


def _tool(given: Any, place: str) -> Mapping[str, Any]:
    """Return the schema of a function, which this API does not nest, in the format of chat completions."""
    if not isinstance(given, Mapping) or given.get("type") != "function":
        raise refusal(
            place,
            f"{given!r:.80} is not a function",
            'give {"type": "function", "name": ..., "parameters": ...}',
            "malformed",
        )
    return checked_tool({"type": "function", "function": given}, place)


def _status(answer: PolicyAnswer) -> str:
    return "incomplete" if answer.finish == "length" else "completed"


def _head(answer: PolicyAnswer, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"resp_{answer.identity}",
        "object": "response",
        "created_at": answer.created,
        "model": model,
        "error": None,
        "instructions": body.get("instructions"),
        "previous_response_id": body.get("previous_response_id"),
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "temperature": None,
        "top_p": None,
    }
