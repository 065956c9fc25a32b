"""Starts a gateway with a simulated engine on a free port of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from openai import AsyncOpenAI

from roll.agents.gateway.server import Gateway, GatewayBounds
from roll.agents.gateway.session import AgentSession
from tests import limits
from tests.unit.gateway.asking import session
from tests.unit.rollout.playing import Engine

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
BODY_BYTES = 1 << 16


@dataclass(frozen=True)
class Served:
    """A gateway that serves one session over HTTP."""

    gateway: Gateway
    session: AgentSession
    engine: Engine
    key: str
    client: AsyncOpenAI


@asynccontextmanager
async def served(engine: Engine, sessions: int = 8, **keys: Any) -> AsyncGenerator[Served, None]:
    """Start a gateway with one session, and an OpenAI client with the session's key."""
    gateway, opened = Gateway(GatewayBounds(BODY_BYTES, sessions)), session(engine, **keys)
    async with (
        gateway.listening(LOOPBACK, 0),
        gateway.serving(opened) as key,
        AsyncOpenAI(base_url=gateway.base_url, api_key=key, timeout=limits.CALL) as client,
    ):
        yield Served(gateway, opened, engine, key, client)


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(limits.CALL):
            return await work

    return asyncio.run(bounded())
