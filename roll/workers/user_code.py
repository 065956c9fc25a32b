"""Common parts of workers that run the user's code: their log is bounded, because that code prints into it."""

from __future__ import annotations

import asyncio

from roll.system.bounded_log import begin_anew

SLACK = 60.0
"""Seconds for the way to a worker and back."""
LOG_DESCRIPTOR = 2
LOG_BYTES = 100 << 20
"""Largest size of a worker's log. As much again is kept beside it."""
LOOK_EVERY = 1.0
"""Seconds between two looks at its size."""


async def bound_log() -> None:
    """Look after the log of this process, until cancelled."""
    while True:
        await asyncio.to_thread(begin_anew, LOG_DESCRIPTOR, LOG_BYTES)
        await asyncio.sleep(LOOK_EVERY)
