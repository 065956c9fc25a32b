"""Calls a model behind a URL with OpenAI's chat-completions protocol. Requests are retried and counted. A failure never ends a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from roll.rewards.judges.chat_retry import Refusal, longest_wait, read_reply, wait_seconds
from roll.rewards.judges.judge import Reply
from roll.types import Sampling

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

    @property
    def address(self) -> str:
        """Return the URL that requests are sent to."""
        base = self.url.rstrip("/")
        return base if base.endswith(COMPLETIONS) else base + COMPLETIONS

    @property
    def longest_seconds(self) -> float:
        """Return the largest number of seconds from the first attempt of a request to its reply or failure."""
        return (self.retries + 1) * self.seconds + longest_wait(self.retries)

    def body(self, message: str) -> dict[str, Any]:
        """Return the JSON body of a request with one user message. Optional fields are sent only if they differ from their defaults."""
        sampling = self.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": message}],
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

    def __init__(self, model: ApiModel, sleep: Sleep = asyncio.sleep, transport: httpx.AsyncBaseTransport | None = None) -> None:
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

    async def ask(self, message: str) -> Reply:
        """See `Chat`. Waits until fewer than `concurrency` requests are in flight, and then at most `ApiModel.longest_seconds`."""
        async with self._turns:
            return await self._attempts(self._model.body(message))

    async def _attempts(self, body: dict[str, Any]) -> Reply:
        for attempt in range(1, self._model.retries + 2):
            if self._model.max_calls is not None and self._calls >= self._model.max_calls:
                return self._failed(f"judge_max_calls ({self._model.max_calls}) is used up; responses that need a call get no verdict")
            self._calls += 1
            reply = await self._request(body)
            if isinstance(reply, Reply):
                return reply
            if not reply.again or attempt > self._model.retries:
                attempts = f" (attempt {attempt})" if attempt > 1 else ""
                return self._failed(f"{self._model.address}: {reply.why}{attempts}")
            await self._sleep(wait_seconds(attempt, reply.after, self._random))
        raise AssertionError("the last attempt returns")

    async def _request(self, body: dict[str, Any]) -> Reply | Refusal:
        try:
            # httpx limits each read, but not the whole request: a server may send single bytes slowly.
            async with asyncio.timeout(self._model.seconds):
                response = await self._client.post(self._model.address, json=body)
        except (TimeoutError, httpx.TimeoutException):
            return Refusal(f"no response within {self._model.seconds:g} s", again=True)
        except httpx.HTTPError as error:
            return Refusal(f"{type(error).__name__}: {error}", again=True)
        return read_reply(response.status_code, response.headers, response.content)

    def _failed(self, why: str) -> Reply:
        """Return a failed reply. Each distinct cause is logged once, up to MOST_SAID causes; the result's note always has the cause."""
        if why not in self._said and len(self._said) < MOST_SAID:
            self._said.add(why)
            LOG.warning("no verdict: %s", why)
        return Reply(failure=why)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
