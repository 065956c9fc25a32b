"""Anthropic's messages API: parses requests and builds responses. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from roll.agents.gateway.asked import AgentRequest, Message, PolicyAnswer, RequestRefused, refusal
from roll.agents.gateway.checked import (
    MOST_MESSAGES,
    MOST_TOOLS,
    call_of,
    check_keys,
    check_order,
    checked_tool,
    count_of,
    flag_of,
    listed,
    overruled,
    stops_of,
)

MEANT = frozenset({"max_tokens", "messages", "stop_sequences", "system", "thinking", "tool_choice", "tools"})
IGNORED = frozenset(
    {
        *("cache_control", "inference_geo", "metadata", "model", "output_config", "service_tier", "speed", "stream"),
        *("temperature", "top_k", "top_p", "user_profile_id", "workspace_id"),
    }
)
"""Keys that do not change the answer: of bills and caches, and the sampling settings, which are those of the run."""
NEUTRAL: Mapping[str, tuple[Sequence[Any], str]] = {
    "container": ((), "leave it out: nothing runs beside the policy"),
    "context_management": (
        ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "leave it out, and shorten the messages yourself",
    ),
    "diagnostics": ((), "leave it out"),
    "mcp_servers": (([],), "leave it out, and call the servers' tools yourself"),
}
TOOL_NEUTRAL: Mapping[str, tuple[Sequence[Any], str]] = {
    "allowed_callers": (([], ["direct"]), "leave it out: the policy calls tools itself"),
    "defer_loading": ((False,), "leave it out: the policy sees all tools"),
    "input_examples": (([],), "leave it out, and write the examples into the description"),
    "strict": ((False,), "leave it out: nothing forces the policy to follow the schema"),
}
CHOICES = {
    "any": "give 'auto', or leave tool_choice out: the policy chooses",
    "tool": "give 'auto', or leave tool_choice out: the policy chooses",
    "none": "leave `tools` out",
}
"""Kinds of `tool_choice` that cannot be honoured, with their remedies."""
BLOCKS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"type", "text"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "tool_use": frozenset({"type", "id", "name", "input"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error"}),
}
"""Keys of the blocks of a content, by their `type`."""
BLOCK_NEUTRAL: Mapping[str, tuple[Sequence[Any], str]] = {
    "citations": (([],), "leave it out: the policy cites nothing"),
    "caller": (({"type": "direct"},), "leave it out: the policy calls tools itself"),
}
CACHED = frozenset({"cache_control"})
KINDS_OF = {"system": ("text",), "user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use")}
"""Types of the blocks that a message of each role may have."""
ERROR = "Error: "
"""What the policy reads before the text of a result with `is_error`, as in roll's own environments."""
REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
"""The `stop_reason` by the finish reason of an answer."""
ERRORS = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 413: "request_too_large"}
"""Types of errors by HTTP status. Others are `invalid_request_error`, and from 500 on `api_error`."""
Block = Mapping[str, Any]


def read_messages(body: Mapping[str, Any]) -> AgentRequest:
    """Parse the body of a request. Raises Refused if it is invalid or not supported."""
    check_keys(body, MEANT, NEUTRAL, IGNORED)
    messages = _messages(body.get("messages"))
    check_order(messages, "messages")
    if system := _text(body.get("system"), "system"):
        messages = [{"role": "system", "content": system}, *messages]
    tools = [
        _tool(one, f"tools[{number}]") for number, one in enumerate(listed(body.get("tools"), "tools", MOST_TOOLS))
    ]
    _check_choice(body.get("tool_choice"), bool(tools))
    thinking, effort = _thinking(body.get("thinking")), _effort(body.get("output_config"))
    return AgentRequest(
        messages,
        tools,
        count_of(body.get("max_tokens"), "max_tokens"),
        stops_of(body.get("stop_sequences"), "stop_sequences"),
        overruled({**body, "thinking.budget_tokens": thinking.get("budget_tokens"), "output_config.effort": effort}),
    )


def shown_thinking(body: Mapping[str, Any]) -> str:
    """Return how an answer shows the policy's thinking: `whole`, `omitted` (an empty block) or `hidden` (no block)."""
    thinking = body.get("thinking") or {}
    if thinking.get("type", "disabled") == "disabled":
        return "hidden"
    return "omitted" if thinking.get("display") == "omitted" else "whole"


def message_body(answer: PolicyAnswer, model: str, thinking: str) -> dict[str, Any]:
    """Return the body of a response that is not streamed. `thinking` is of `shown_thinking`."""
    return {
        **_head(answer, model),
        "content": _content(answer, thinking),
        **_end(answer),
        "usage": {**_input_usage(answer), "output_tokens": answer.completion_tokens},
    }


def message_events(answer: PolicyAnswer, model: str, thinking: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed response."""
    begun = {**_head(answer, model), "content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": {**begun, "usage": {**_input_usage(answer), "output_tokens": 0}}}
    yield {"type": "ping"}
    for index, block in enumerate(_content(answer, thinking)):
        empty, deltas = _parts(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    usage = {**_input_usage(answer), "output_tokens": answer.completion_tokens}
    yield {"type": "message_delta", "delta": _end(answer), "usage": usage}
    yield {"type": "message_stop"}


def error_body(refused: RequestRefused) -> dict[str, Any]:
    """Return the body of a refusal in the error format of Anthropic's API."""
    kind = ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


def _messages(given: Any) -> list[Message]:
    messages: list[Message] = []
    for number, one in enumerate(listed(given, "messages", MOST_MESSAGES)):
        place = f"messages[{number}]"
        role = one.get("role") if isinstance(one, Mapping) else None
        if not isinstance(role, str) or role not in KINDS_OF:
            remedy = f"give one of {', '.join(KINDS_OF)}"
            raise refusal(f"{place}.role", f"{role!r:.80} is not supported", remedy, "not_supported")
        check_keys(one, frozenset({"role", "content"}), {}, frozenset(), f"{place}.")
        blocks = _blocks(one.get("content"), f"{place}.content", KINDS_OF[role])
        messages += _user(blocks) if role == "user" else [_said(role, blocks)]
    return messages


def _blocks(given: Any, place: str, kinds: Sequence[str]) -> list[tuple[str, Block]]:
    """Return the blocks of a content with their places. Raises Refused for blocks of other kinds, as of images."""
    if isinstance(given, str):
        return [(place, {"type": "text", "text": given})]
    blocks = []
    for number, block in enumerate(listed(given, place, MOST_MESSAGES)):
        at = f"{place}[{number}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise refusal(f"{at}.type", f"{kind!r:.80} is not supported", f"send {', '.join(kinds)}", "not_supported")
        check_keys(block, BLOCKS[kind], BLOCK_NEUTRAL, CACHED, f"{at}.")
        blocks.append((at, block))
    return blocks


def _user(blocks: Sequence[tuple[str, Block]]) -> list[Message]:
    """Return the messages of a user's blocks: one for each result of a tool, and one for the text after them."""
    results = [one for one in blocks if one[1]["type"] == "tool_result"]
    if results != list(blocks[: len(results)]):
        remedy = "send the results of tools first, and the text after them"
        raise refusal(results[-1][0], "a result of a tool after text", remedy, "not_allowed")
    messages = [_result(block, at) for at, block in results]
    return messages if results and len(results) == len(blocks) else [*messages, _said("user", blocks[len(results) :])]


def _result(block: Block, place: str) -> Message:
    if not isinstance(block.get("tool_use_id"), str):
        raise refusal(f"{place}.tool_use_id", "missing", "give the id of the call that the block answers", "missing")
    text = _text(block.get("content"), f"{place}.content")
    content = f"{ERROR}{text}" if flag_of(block.get("is_error"), f"{place}.is_error") else text
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def _said(role: str, blocks: Sequence[tuple[str, Block]]) -> Message:
    """Return the message of one role with the joined texts, the joined thinking and the calls of the blocks."""
    thinking = "".join(_string(block, "thinking", at) for at, block in blocks if block["type"] == "thinking")
    calls = [_call(block, at) for at, block in blocks if block["type"] == "tool_use"]
    text = "".join(_string(block, "text", at) for at, block in blocks if block["type"] == "text")
    message: dict[str, Any] = {"role": role, "content": text}
    return message | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thinking} if thinking else {})


def _call(block: Block, place: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, Mapping):
        problem = f"{given!r:.80} is not an object"
        raise refusal(f"{place}.input", problem, "send calls back unchanged", "wrong_type")
    return call_of(block.get("id"), block.get("name"), json.dumps(given, ensure_ascii=False), place)


def _text(given: Any, place: str) -> str:
    """Return the text of a string, null, or text blocks, which are joined."""
    return "".join(_string(block, "text", at) for at, block in _blocks(given, place, ("text",)))


def _string(block: Block, key: str, place: str) -> str:
    if not isinstance(text := block.get(key), str):
        raise refusal(f"{place}.{key}", f"{text!r:.80} is not a string", "give a string", "wrong_type")
    return text


def _tool(given: Any, place: str) -> Mapping[str, Any]:
    """Return the schema of a tool in the format of chat completions. Raises Refused for Anthropic's own tools."""
    if not isinstance(given, Mapping) or not isinstance(given.get("input_schema"), Mapping):
        kind = given.get("type") if isinstance(given, Mapping) else None
        place, problem = (f"{place}.type", f"{kind!r:.80} is not supported") if kind else (place, f"{given!r:.80}")
        raise refusal(place, problem, 'give {"name": ..., "description": ..., "input_schema": {...}}', "not_supported")
    neutral = {**TOOL_NEUTRAL, "type": (("custom",), "leave it out")}
    meant = frozenset({"name", "description", "input_schema"})
    check_keys(given, meant, neutral, CACHED | {"eager_input_streaming"}, f"{place}.")
    described = {key: given[key] for key in ("name", "description") if given.get(key) is not None}
    return checked_tool({"type": "function", "function": {**described, "parameters": given["input_schema"]}}, place)


def _check_choice(given: Any, has_tools: bool) -> None:
    """Raise Refused unless the policy may choose its tools, or there are none and none may be called."""
    if given is None:
        return
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind != "auto" and (has_tools or kind != "none"):
        remedy = CHOICES.get(str(kind), "give 'auto'")
        raise refusal("tool_choice.type", f"{kind!r:.80} is not supported", remedy, "not_supported")
    parallel = {"disable_parallel_tool_use": ((False,), "leave it out: the policy may call several tools at once")}
    check_keys(given, frozenset({"type"}), parallel, frozenset(), "tool_choice.")


def _thinking(given: Any) -> Mapping[str, Any]:
    """Return the block `thinking`, {} for null. Raises Refused if its type or its display is not supported."""
    if given is None:
        return {}
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        problem, remedy = f"{kind!r:.80} is not supported", "give one of enabled, adaptive, disabled"
        raise refusal("thinking.type", problem, remedy, "not_supported")
    display = {"display": (("summarized", "omitted"), "give 'summarized', which shows all of it, or 'omitted'")}
    check_keys(given, frozenset({"type", "budget_tokens"}), display, frozenset(), "thinking.")
    return given


def _effort(given: Any) -> Any:
    """Return the effort of the block `output_config`. Raises Refused if the block asks for a format."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise refusal("output_config", f"{given!r:.80} is not an object", "leave it out", "wrong_type")
    plain = {"format": ((), "leave it out, and ask for the format in a message")}
    check_keys(given, frozenset({"effort"}), plain, frozenset(), "output_config.")
    return given.get("effort")


def _content(answer: PolicyAnswer, thinking: str) -> list[dict[str, Any]]:
    message, blocks = answer.message, list[dict[str, Any]]()
    if thinking != "hidden" and (thought := message.get("reasoning_content")):
        shown = thought if thinking == "whole" else ""
        blocks.append({"type": "thinking", "thinking": shown, "signature": answer.identity})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        named = {"id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        blocks.append({"type": "tool_use", **named})
    return blocks


def _parts(block: Block) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as it starts, and the deltas that complete it."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        signed = {"type": "signature_delta", "signature": block["signature"]}
        thought = [{"type": "thinking_delta", "thinking": block["thinking"]}] if block["thinking"] else []
        return {"type": "thinking", "thinking": "", "signature": ""}, [*thought, signed]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]


def _head(answer: PolicyAnswer, model: str) -> dict[str, Any]:
    return {"id": f"msg_{answer.identity}", "type": "message", "role": "assistant", "model": model}


def _end(answer: PolicyAnswer) -> dict[str, Any]:
    is_stopped = answer.finish == "stop" and answer.stop_text is not None
    reason = "stop_sequence" if is_stopped else REASONS[answer.finish]
    return {"stop_reason": reason, "stop_sequence": answer.stop_text if is_stopped else None}


def _input_usage(answer: PolicyAnswer) -> dict[str, int]:
    """Return the counts of the tokens that the engine read. They and those of the caches add up to the whole input."""
    read = answer.cached_tokens
    return {
        "input_tokens": answer.prompt_tokens - read,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": read,
    }
