"""The gateway: an HTTP server through which external agents use the policy with OpenAI's chat completions or responses
API, or Anthropic's messages API.

Each session has a key, which its agent sends as the bearer token or as `x-api-key`; a request without a valid key is
refused. The size of a request body, the time to send it, and the number of sessions are limited. A request has no
deadline of its own; closing its session ends it, and so does its agent by hanging up (session.py).

OpenAI's chat completions API: parses requests and builds responses. Pure functions.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from roll.agents.environments.base import Step
from roll.agents.environments.checked import BadReturn, no_picture, step_of
from roll.agents.gateway.asked import AgentRequest, Message, PolicyAnswer, RequestRefused, refusal
from roll.agents.gateway.checked import (
    NEUTRAL,
    check_keys,
    check_order,
    count_of,
    flag_of,
    messages_of,
    overruled,
    stops_of,
    tools_of,
)
from roll.agents.gateway.messages import error_body, message_body, message_events, read_messages, shown_thinking
from roll.agents.gateway.responses import read_response, request_conversation, response_body, response_events
from roll.agents.gateway.session import AgentSession
from roll.errors import ConfigError, Fault, RollError
from roll.system.text import cleaned

MEANT = frozenset({"messages", "tools", "max_tokens", "max_completion_tokens", "stop"})


def read_chat(body: Mapping[str, Any]) -> AgentRequest:
    """Parse the body of a request. Raises Refused if it is invalid or not supported."""
    check_keys(body, MEANT, NEUTRAL)
    messages = messages_of(body.get("messages"), "messages")
    check_order(messages, "messages")
    counts = [count_of(body.get(key), key) for key in ("max_completion_tokens", "max_tokens")]
    return AgentRequest(
        messages,
        tools_of(body.get("tools"), "tools"),
        next((one for one in counts if one), None),
        stops_of(body.get("stop"), "stop"),
        overruled(body),
    )


def read_report(body: Mapping[str, Any]) -> Step:
    """Parse the body of a report: `reward`, and `metrics` by name. Raises Refused if it is invalid."""
    if unknown := sorted(body.keys() - {"reward", "metrics"}):
        raise refusal(unknown[0], "unknown key", "send reward and metrics", "unknown_key")
    if "reward" not in body or isinstance(body["reward"], bool):
        raise refusal("reward", f"{body.get('reward')!r} is no number", "send the reward of the episode", "wrong_type")
    try:
        return step_of(Step(reward=body["reward"], metrics=body.get("metrics") or {}), no_picture)
    except BadReturn as error:
        raise refusal("reward", str(error), "send finite numbers", "not_allowed") from error


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Return whether the request wants token counts at the stream's end. Raises Refused if its options are invalid."""
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise refusal("stream_options", f"{options!r:.80} is not an object", "leave it out", "wrong_type")
    return flag_of(options.get("include_usage"), "stream_options.include_usage")


def chat_body(answer: PolicyAnswer, model: str) -> dict[str, Any]:
    """Return the body of a response that is not streamed."""
    said = answer.message["content"]
    message = {**answer.message, "refusal": None, "content": None if _calls(answer) and not said else said}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish}
    return {**_head(answer, model, "chat.completion"), "choices": [choice], "usage": usage(answer)}


def chat_chunks(answer: PolicyAnswer, model: str, with_usage: bool) -> Iterator[dict[str, Any]]:
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


def usage(answer: PolicyAnswer) -> dict[str, Any]:
    """Return the token counts of an answer."""
    total = answer.prompt_tokens + answer.completion_tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens": answer.completion_tokens,
        "total_tokens": total,
    }


def _calls(answer: PolicyAnswer) -> list[Mapping[str, Any]]:
    return list(answer.message.get("tool_calls") or ())


def _head(answer: PolicyAnswer, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.identity}", "object": kind, "created": answer.created, "model": model}


LOG = logging.getLogger(__name__)
BODY_SECONDS = 60.0
"""Deadline in seconds for receiving the body of a request."""
STOP_SECONDS = 5.0
"""Deadline in seconds for open connections to finish when the gateway closes."""
KEEP_ALIVE_SECONDS = 3.0
"""Seconds between two keep-alive comments on a stream that waits for its answer."""
ALIVE = b": waiting\n\n"
MESSAGES = "/v1/messages"
"""Path of Anthropic's messages API, whose errors have a format of their own."""
REWARD = "/v1/reward"
"""Path at which an agent reports the reward of its episode."""
MODEL = "policy"
"""Model name in an answer if the request gives none."""
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that mean all interfaces of this machine, with the address that local agents use instead."""


@dataclass(frozen=True)
class GatewayBounds:
    """Limits of the gateway."""

    body_bytes: int
    """Largest size of a request body."""
    sessions: int
    """Largest number of concurrent sessions. Further sessions wait."""


@dataclass(eq=False)
class _Open:
    """An open session."""

    session: AgentSession
    conversations: dict[str, Sequence[Message]] = field(default_factory=dict)
    """The conversation up to each response, by the response's id."""


class Gateway:
    """Serves sessions by their keys. Must be used from a single asyncio event loop."""

    def __init__(self, bounds: GatewayBounds) -> None:
        self._bounds, self._open, self._room = bounds, dict[str, _Open](), asyncio.Semaphore(bounds.sessions)
        self._told = set[str]()
        self.base_url = ""
        """The OPENAI_BASE_URL of agents. Set while the gateway listens."""

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncGenerator[Gateway, None]:
        """Listen on an address within the `async with` block; port 0: a free one. Raises ConfigError if it cannot."""
        app = web.Application(client_max_size=self._bounds.body_bytes, middlewares=[_plain_errors])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post(MESSAGES, self._messages)
        app.router.add_post(f"{MESSAGES}/count_tokens", self._count)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post(REWARD, self._reward)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_SECONDS, handler_cancellation=True)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                problem = f"cannot listen on {host}:{port}: {error.strerror or error}"
                raise ConfigError(
                    Fault("gateway", problem, "give an address of this machine, and port 0 for a free one", "failed")
                ) from error
            name = ANYWHERE.get(host, host)
            self.base_url = f"http://{f'[{name}]' if ':' in name else name}:{runner.addresses[0][1]}/v1"
            yield self
        finally:
            await runner.cleanup()

    @asynccontextmanager
    async def serving(self, session: AgentSession) -> AsyncGenerator[str, None]:
        """Answer a session's requests within the `async with` block. Yields its key. Waits for a free session."""
        async with self._room:
            key = f"roll-{secrets.token_urlsafe(32)}"
            self._open[key] = _Open(session)
            try:
                yield key
            finally:
                del self._open[key]
                await session.close()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        opened = self._of(request)
        body, digest = await _body_of(request)
        asked, is_stream, with_usage = read_chat(body), flag_of(body.get("stream"), "stream"), wants_usage(body)
        asking, model = self._answer(opened, asked, f"chat {digest}"), _model(body)
        if not is_stream:
            return web.json_response(chat_body(await asking, model))
        return await _streamed(
            request, asking, lambda answer: [*map(_data, chat_chunks(answer, model, with_usage)), b"data: [DONE]\n\n"]
        )

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        opened = self._of(request)
        body, digest = await _body_of(request)
        asked, is_stream = read_messages(body), flag_of(body.get("stream"), "stream")
        asking, model, thinking = self._answer(opened, asked, f"messages {digest}"), _model(body), shown_thinking(body)
        if not is_stream:
            return web.json_response(message_body(await asking, model, thinking))
        return await _streamed(request, asking, lambda answer: map(_event, message_events(answer, model, thinking)))

    async def _count(self, request: web.Request) -> web.Response:
        opened = self._of(request)
        body, _ = await _body_of(request)
        return web.json_response({"input_tokens": await opened.session.count(read_messages(body))})

    async def _reward(self, request: web.Request) -> web.Response:
        opened = self._of(request)
        body, _ = await _body_of(request)
        opened.session.report(read_report(body))
        return web.json_response({})

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        opened = self._of(request)
        body, digest = await _body_of(request)
        asked, is_stream = read_response(body, opened.conversations), flag_of(body.get("stream"), "stream")
        asking, model = self._kept(opened, asked, f"responses {digest}", body), _model(body)
        if not is_stream:
            return web.json_response(response_body(await asking, model, body))
        return await _streamed(request, asking, lambda answer: map(_event, response_events(answer, model, body)))

    async def _kept(self, opened: _Open, asked: AgentRequest, identity: str, body: Mapping[str, Any]) -> PolicyAnswer:
        """Return the answer, and keep its conversation, so that a request can continue it by the response's id."""
        answer = await self._answer(opened, asked, identity)
        opened.conversations[f"resp_{answer.identity}"] = [
            *request_conversation(body, opened.conversations),
            answer.message,
        ]
        return answer

    def _answer(self, opened: _Open, asked: AgentRequest, identity: str) -> Coroutine[Any, Any, PolicyAnswer]:
        """Return the coroutine of an answer. Warn, once for each place, of settings that have no effect."""
        for place, value in opened.session.overruled(asked).items():
            if place not in self._told:
                self._told.add(place)
                LOG.warning("%s: agents ask for %.80r, which has no effect: the run decides it", place, value)
        return opened.session.answer(asked, identity)

    async def _models(self, request: web.Request) -> web.Response:
        self._of(request)
        return web.json_response(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "roll"}]}
        )

    def _of(self, request: web.Request) -> _Open:
        """Return the session of a request. Raises Refused if its key is not that of an open session."""
        kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
        keys = (request.headers.get("x-api-key", ""), bearer if kind.lower() == "bearer" else "")
        if (found := next(filter(None, (self._open.get(key.strip()) for key in keys)), None)) is None:
            fault = Fault(
                "Authorization",
                "not the key of an open session",
                "send `Bearer` and the agent's OPENAI_API_KEY, or the same key as `x-api-key`",
                "not_found",
            )
            raise RequestRefused(401, fault, "authentication_error")
        request[OPENED] = found
        return found


OPENED = web.RequestKey("opened", _Open)
"""Key of the session in a request's state, set once the session is known."""


async def _body_of(request: web.Request) -> tuple[Mapping[str, Any], str]:
    """Return (a request's body, a digest that is equal for retries). Raises Refused if it is late or no JSON object."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            sent = await request.read()
    except TimeoutError as error:
        raise refusal(
            "body", f"not complete after {BODY_SECONDS:g} s", "send it without delay", "timed_out", 408
        ) from error
    return await asyncio.to_thread(_read_body, sent)


def _read_body(sent: bytes) -> tuple[Mapping[str, Any], str]:
    try:
        body = cleaned(json.loads(sent))
    except (ValueError, RecursionError) as error:
        raise refusal("body", f"not JSON: {error!s:.200}", "send the JSON text of an object", "malformed") from error
    if not isinstance(body, dict):
        raise refusal("body", "not an object", "send the JSON text of an object", "wrong_type")
    counted = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    return body, hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()


async def _streamed(
    request: web.Request, asking: Awaitable[PolicyAnswer], written: Callable[[PolicyAnswer], Iterable[bytes]]
) -> web.StreamResponse:
    """Send the complete answer as server-sent events, with keep-alive comments before it."""
    task = asyncio.ensure_future(asking)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        done, _ = await asyncio.wait({task}, timeout=KEEP_ALIVE_SECONDS)
        if done:
            task.result()  # an early refusal still gets its own HTTP status
        await response.prepare(request)
        while not (await asyncio.wait({task}, timeout=KEEP_ALIVE_SECONDS))[0]:
            await response.write(ALIVE)
        try:
            for event in written(task.result()):
                await response.write(event)
        except RequestRefused as refused:
            await response.write(_refused_event(request, refused))
        except RollError as error:
            await response.write(_refused_event(request, _failure(error)))
        await response.write_eof()
    except ConnectionError:
        # The session keeps the answer for a retry.
        LOG.debug("an agent closed the connection before it received its answer")
    finally:
        if not task.done():
            task.cancel()
    return response


@web.middleware
async def _plain_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Convert errors to responses in the error format of the request's API."""
    try:
        return await handler(request)
    except RequestRefused as refused:
        if (opened := request.get(OPENED)) is not None:
            opened.session.refused = str(refused)  # for the note, if the agent fails because of it
        return _refused(request, refused)
    except web.HTTPRequestEntityTooLarge as error:
        fault = Fault(
            "body", f"larger than {request.client_max_size} bytes", "send less, or raise gateway.body_mib", "too_large"
        )
        return _refused(request, RequestRefused(error.status, fault))
    except web.HTTPException as error:
        remedy = f"use POST /v1/chat/completions, /v1/responses, {MESSAGES} or its count_tokens, or GET /v1/models"
        return _refused(request, RequestRefused(error.status, Fault(request.path, error.reason, remedy, "not_found")))
    except RollError as error:
        return _refused(request, _failure(error))


def _refused(request: web.Request, refused: RequestRefused) -> web.Response:
    body = error_body(refused) if request.path.startswith(MESSAGES) else refused.body()
    return web.json_response(body, status=refused.status)


def _refused_event(request: web.Request, refused: RequestRefused) -> bytes:
    return _event(error_body(refused)) if request.path.startswith(MESSAGES) else _data(refused.body())


def _failure(error: RollError) -> RequestRefused:
    """Return the refusal for an agent after the engine has failed. The task of the episode raises the error itself."""
    return RequestRefused(500, Fault("policy", str(error), "the run ends", "failed"), "server_error")


def _model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    return model if isinstance(model, str) and model else MODEL


def _data(event: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(event)}\n\n".encode()


def _event(event: Mapping[str, Any]) -> bytes:
    return f"event: {event['type']}\n".encode() + _data(event)
