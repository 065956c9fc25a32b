"""OpenAI's chat completions API: parses requests and builds responses. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roll.agents.gateway.asked import Answer, Asked, refusal
from roll.agents.gateway.checked import NEUTRAL, check_keys, check_order, count_of, flag_of, messages_of, stops_of, tools_of

MEANT = frozenset({"messages", "tools", "max_tokens", "max_completion_tokens", "stop"})


def read_chat(body: Mapping[str, Any]) -> Asked:
    """Parse the body of a request. Raises Refused if it is invalid or not supported."""
    check_keys(body, MEANT, NEUTRAL)
    messages = messages_of(body.get("messages"), "messages")
    check_order(messages, "messages")
    counts = [count_of(body.get(key), key) for key in ("max_completion_tokens", "max_tokens")]
    return Asked(
        messages, tools_of(body.get("tools"), "tools"), next((one for one in counts if one), None), stops_of(body.get("stop"), "stop")
    )


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Return whether the request wants token counts at the end of the stream. Raises Refused if its options are invalid."""
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise refusal("stream_options", f"{options!r:.80} is not an object", "leave it out")
    return flag_of(options.get("include_usage"), "stream_options.include_usage")


def chat_body(answer: Answer, model: str) -> dict[str, Any]:
    """Return the body of a response that is not streamed."""
    said = answer.message["content"]
    message = {**answer.message, "refusal": None, "content": None if _calls(answer) and not said else said}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish}
    return {**_head(answer, model, "chat.completion"), "choices": [choice], "usage": usage(answer)}


def chat_chunks(answer: Answer, model: str, with_usage: bool) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed response."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if answer.message.get("reasoning_content"):
        deltas.append({"reasoning_content": answer.message["reasoning_content"]})
    if answer.message["content"]:
        deltas.append({"content": answer.message["content"]})
    deltas += [{"tool_calls": [{"index": number, **call}]} for number, call in enumerate(_calls(answer))]
    head = _head(answer, model, "chat.completion.chunk")
    for delta in deltas:
        yield {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": answer.finish}]}
    if with_usage:
        yield {**head, "choices": [], "usage": usage(answer)}


def usage(answer: Answer) -> dict[str, int]:
    """Return the token counts of an answer."""
    total = answer.prompt_tokens + answer.completion_tokens
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens, "total_tokens": total}


def _calls(answer: Answer) -> list[Mapping[str, Any]]:
    return list(answer.message.get("tool_calls") or ())


def _head(answer: Answer, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.identity}", "object": kind, "created": answer.created, "model": model}
