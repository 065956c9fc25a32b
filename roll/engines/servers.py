"""Waits for servers outside the run."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import httpx

ASK_EVERY, ASK_SECONDS = 2.0, 10.0
"""Seconds between two questions, and the deadline of each."""


async def until_healthy(url: str) -> None:
    """Wait, without a deadline, until a server's `/health` has status 200."""
    async with httpx.AsyncClient(timeout=ASK_SECONDS, trust_env=False) as client:
        while True:
            with suppress(httpx.HTTPError):
                if (await client.get(f"{url.rstrip('/')}/health")).status_code == 200:
                    return
            await asyncio.sleep(ASK_EVERY)
