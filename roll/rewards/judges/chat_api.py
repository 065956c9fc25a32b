"""Calls a model behind a URL with OpenAI's chat-completions protocol. Requests are retried and counted. A failure never
ends a run.

Parses the response of a chat server, and decides when to retry. Pure functions.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from random import Random
from typing import Any

import httpx

from roll.rewards.judges.judge import JudgeReply
from roll.system.text import cleaned
from roll.types import Sampling

TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses after which a retry of the same request may succeed."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before the first retry, and the largest number of seconds before any retry."""
SHOWN_CHARACTERS = 200
Messages = Sequence[Mapping[str, Any]]
"""Messages of a conversation in OpenAI's format."""
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions of a server's JSON: wrong types, missing keys, `Infinity` as a number of tokens, deep nesting."""


@dataclass(frozen=True)
class Refusal:
    """A failed request."""

    why: str
    again: bool
    """Whether to retry the request."""
    after: float | None = None
    """Seconds to wait before a retry, as requested by the server."""


def wait_seconds(attempt: int, after: float | None, random: Random) -> float:
    """Return the seconds to wait after `attempt` failed attempts (1 or more).

    The wait doubles each time, up to `LONGEST_WAIT`. A random factor of 0.5 to 1 spreads out requests that failed
    together. If the server requests a longer wait (`after`), that wait is used, also up to `LONGEST_WAIT`.
    """
    longest = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(attempt - 1, 30))
    return min(LONGEST_WAIT, max(longest * random.uniform(0.5, 1.0), after or 0.0))


def parse_chat_response(
    status: int, headers: Mapping[str, str], body: bytes, now: datetime | None = None
) -> JudgeReply | Refusal:
    """Parse a response of the chat-completions protocol. A date in `Retry-After` is relative to the time `now`."""
    if status in TRANSIENT:
        return Refusal(
            f"status {status}: {_message(body)}", again=True, after=_retry_after(headers.get("retry-after"), now)
        )
    if status != 200:
        return Refusal(f"status {status}: {_message(body)}", again=False)
    try:
        said: Any = cleaned(json.loads(body))
        answers = tuple(_content(choice["message"]) for choice in said["choices"])
        usage = said.get("usage") or {}
        counts = [int(usage.get(key) or 0) for key in ("prompt_tokens", "completion_tokens")]
        cut = sum(choice.get("finish_reason") == "length" for choice in said["choices"])
    except UNREADABLE:
        return Refusal(f"the response is not a chat completion: {_excerpt(body)}", again=True)
    if not answers:
        return Refusal("the response has no choices", again=True)
    return JudgeReply(answers, counts[0], counts[1], cut=cut)


def _content(message: Mapping[str, Any]) -> str:
    """Return the text of a message. Servers send null for an empty text, and some send a list of parts."""
    content = message["content"]
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    if content is not None and not isinstance(content, str):
        raise TypeError("content is neither a string nor a list")
    return content or ""


def _retry_after(value: str | None, now: datetime | None) -> float | None:
    """Return the seconds that a `Retry-After` header (a number or a date) specifies, or None if it is neither."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (date - (now or datetime.now(UTC))).total_seconds())


def _message(body: bytes) -> str:
    """Return the error message if the body has OpenAI's error format, else the start of the body."""
    try:
        error = cleaned(json.loads(body))["error"]
        return _excerpt((error["message"] if isinstance(error, dict) else str(error)).encode())
    except UNREADABLE:
        return _excerpt(body)


def _excerpt(body: bytes) -> str:
    text = " ".join(body[: 4 * SHOWN_CHARACTERS].decode(errors="replace").split())
    return repr(text[:SHOWN_CHARACTERS])


def user_message(message: str, pictures: Sequence[str]) -> dict[str, Any]:
    """Return a message of the user. Pictures, which are data: URLs, are parts before its text."""
    if not pictures:
        return {"role": "user", "content": message}
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    return {"role": "user", "content": [*shown, {"type": "text", "text": message}]}


LOG = logging.getLogger(__name__)
COMPLETIONS = "/chat/completions"
MOST_SAID = 20
"""Largest number of distinct failure causes to log."""
Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True)
class ApiModel:
    """A model behind a URL, and the settings for calling it."""

    url: str
    """The API's base URL (`https://host/v1`), or the full address that ends in `/chat/completions`."""
    model: str
    key: str | None = field(repr=False)
    """Bearer token, or None."""
    sampling: Sampling
    seconds: float
    """Deadline of one request, in seconds."""
    retries: int
    """Number of retries after a transient failure."""
    concurrency: int
    """Largest number of concurrent requests."""
    max_calls: int | None
    """Largest number of requests in the whole run, including retries. None means no limit."""
    seed: int
    """Seed of the random jitter in the wait before a retry."""
    budget: str = "judge_max_calls"
    """Key that sets `max_calls`, for the message that it is used up."""

    @property
    def address(self) -> str:
        """Return the URL that requests are sent to."""
        base = self.url.rstrip("/")
        return base if base.endswith(COMPLETIONS) else base + COMPLETIONS

    @property
    def longest_seconds(self) -> float:
        """Return the largest number of seconds from the first attempt of a request to its reply or failure."""
        return (self.retries + 1) * self.seconds + self.retries * LONGEST_WAIT

    def body(self, messages: Messages) -> dict[str, Any]:
        """Return the JSON body of a request. Optional fields are sent only if not default."""
        sampling = self.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
        }
        more = {
            "n": (sampling.samples, 1),
            "top_p": (sampling.top_p, 1.0),
            "top_k": (sampling.top_k, -1),
            "repetition_penalty": (sampling.repetition_penalty, 1.0),
            "stop": (list(sampling.stop), []),
            "ignore_eos": (sampling.ignore_eos, False),
        }
        return body | {key: value for key, (value, neutral) in more.items() if value != neutral}


class ApiChat:
    """A `Chat` that calls a model behind a URL. Must be used from a single asyncio event loop, and closed after use."""

    def __init__(
        self, model: ApiModel, sleep: Sleep = asyncio.sleep, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._model, self._sleep = model, sleep
        self._random = Random(model.seed)
        self._turns = asyncio.Semaphore(model.concurrency)
        self._calls = 0
        self._said: set[str] = set()
        headers = {"Authorization": f"Bearer {model.key}"} if model.key else {}
        limits = httpx.Limits(max_connections=model.concurrency, max_keepalive_connections=model.concurrency)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=model.seconds, transport=transport)

    async def start(self) -> None:
        """Do nothing: only a request can show whether the URL answers."""

    async def ask(self, message: str, pictures: Sequence[str] = ()) -> JudgeReply:
        """See `Chat`. Takes as long as `converse`."""
        return await self.converse([user_message(message, pictures)])

    async def converse(self, messages: Messages) -> JudgeReply:
        """Return the model's answer to a conversation.

        Waits for fewer than `concurrency` requests in flight, then up to `ApiModel.longest_seconds`.
        """
        async with self._turns:
            return await self._attempts(self._model.body(messages))

    async def _attempts(self, body: dict[str, Any]) -> JudgeReply:
        for attempt in range(1, self._model.retries + 2):
            if self._model.max_calls is not None and self._calls >= self._model.max_calls:
                used_up = f"{self._model.budget} ({self._model.max_calls}) is used up"
                return self._failed(f"{used_up}; responses that need a call get no verdict")
            self._calls += 1
            reply = await self._request(body)
            if isinstance(reply, JudgeReply):
                return reply
            if not reply.again or attempt > self._model.retries:
                attempts = f" (attempt {attempt})" if attempt > 1 else ""
                return self._failed(f"{self._model.address}: {reply.why}{attempts}")
            await self._sleep(wait_seconds(attempt, reply.after, self._random))
        raise AssertionError("the last attempt returns")

    async def _request(self, body: dict[str, Any]) -> JudgeReply | Refusal:
        try:
            # httpx limits each read, but not the whole request: a server may send single bytes slowly.
            async with asyncio.timeout(self._model.seconds):
                response = await self._client.post(self._model.address, json=body)
        except (TimeoutError, httpx.TimeoutException):
            return Refusal(f"no response within {self._model.seconds:g} s", again=True)
        except httpx.HTTPError as error:
            return Refusal(f"{type(error).__name__}: {error}", again=True)
        return parse_chat_response(response.status_code, response.headers, response.content)

    def _failed(self, why: str) -> JudgeReply:
        """Return a failed reply. The first MOST_SAID causes are logged, once each; the result's note always has it."""
        if why not in self._said and len(self._said) < MOST_SAID:
            self._said.add(why)
            LOG.warning("no verdict: %s", why)
        return JudgeReply(failure=why)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
