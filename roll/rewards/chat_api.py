"""Calls a model behind a URL by OpenAI's chat-completions protocol. Requests are retried and counted. A failure never ends a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from roll.rewards.chat_retry import Refusal, longest_wait, read_reply, wait_seconds
from roll.rewards.judge import Reply
from roll.types import Sampling

LOG = logging.getLogger(__name__)
COMPLETIONS = "/chat/completions"
MOST_SAID = 20
"""Number of different causes of failures in the log."""
Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True)
class ApiModel:
    """A model behind a URL, and the settings of its calls."""

    url: str
    """The API's base (`https://host/v1`), or the whole address with `/chat/completions`."""
    model: str
    key: str | None = field(repr=False)
    """Bearer token, or None."""
    sampling: Sampling
    seconds: float
    """Deadline of one request."""
    retries: int
    """Number of further attempts after a temporary failure."""
    concurrency: int
    """Largest number of concurrent requests."""
    max_calls: int | None
    """Largest number of requests in the whole run, including retries. None means no bound."""
    seed: int
    """Seed of the jitter between attempts."""

    @property
    def address(self) -> str:
        """Return the address of requests."""
        base = self.url.rstrip("/")
        return base if base.endswith(COMPLETIONS) else base + COMPLETIONS

    @property
    def longest_seconds(self) -> float:
        """Seconds in which a message has a reply after its turn began."""
        return (self.retries + 1) * self.seconds + longest_wait(self.retries)

    def body(self, message: str) -> dict[str, Any]:
        """Return the request for a user's message. Fields outside OpenAI's protocol are only sent if they change something."""
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
    """Implements `Chat`. For use from one asyncio event loop; must be closed."""

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
        """See `Chat`. Nothing to prepare: only a call shows whether the URL answers."""

    async def ask(self, message: str) -> Reply:
        """See `Chat`. Waits its turn, and then at most `ApiModel.longest_seconds`."""
        async with self._turns:
            return await self._attempts(self._model.body(message))

    async def _attempts(self, body: dict[str, Any]) -> Reply:
        for attempt in range(1, self._model.retries + 2):
            if self._model.max_calls is not None and self._calls >= self._model.max_calls:
                return self._failed(f"judge_max_calls, {self._model.max_calls}, is used up; responses that need a call get no verdict")
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
            # httpx bounds each read. This bounds a server that sends single bytes slowly.
            async with asyncio.timeout(self._model.seconds):
                response = await self._client.post(self._model.address, json=body)
        except (TimeoutError, httpx.TimeoutException):
            return Refusal(f"no response within {self._model.seconds:g} s", again=True)
        except httpx.HTTPError as error:
            return Refusal(f"{type(error).__name__}: {error}", again=True)
        return read_reply(response.status_code, response.headers, response.content)

    def _failed(self, why: str) -> Reply:
        """Log each cause once, up to MOST_SAID of them. Every result's note has its cause."""
        if why not in self._said and len(self._said) < MOST_SAID:
            self._said.add(why)
            LOG.warning("no verdict: %s", why)
        return Reply(failure=why)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
