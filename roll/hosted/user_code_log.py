"""Shared parts of workers that run user code. Their log is bounded, because user code may print any amount of text to it."""

from __future__ import annotations

import asyncio

from roll.hosted.bounded_log import begin_anew

SLACK = 60.0
"""Time in seconds for sending a call to a worker and its result back."""
LOG_DESCRIPTOR = 2
LOG_BYTES = 100 << 20
"""Largest size of a worker's log in bytes. The previous part, of about the same size, is kept in a second file next to it."""
LOOK_EVERY = 1.0
"""Seconds between two checks of the log's size."""


async def bound_log() -> None:
    """Keep the log of this process below `LOG_BYTES`, until cancelled."""
    while True:
        await asyncio.to_thread(begin_anew, LOG_DESCRIPTOR, LOG_BYTES)
        await asyncio.sleep(LOOK_EVERY)
