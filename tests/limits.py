"""Time limits of all tests, in seconds, and helpers that wait for a condition. No other test file contains a time
limit.

A limit only ends a test that hangs; it is no statement about the speed of the code. Each limit is about twenty times
the time that an idle machine with two cores needs, so that no test fails on a slow or busy machine. The code under test
gets the same limits as its own deadlines, except for deadlines that are meant to expire.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

END = 60.0
"""Time for a killed or closed process to disappear."""
CALL = 300.0
"""Time for a call to a running worker or engine to return, or for a condition to become true."""
PROCESS = 600.0
"""Time for a process to import its modules, do its work and exit."""
START = 1200.0
"""Time for an engine or a role to start, compilation included. Also the timeout of collectives, as one rank may still
be starting.
"""
RUN = 3600.0
"""Time for a whole run, or for all cases that a group of ranks processes one after another."""
EXPIRY = 1.0
"""A deadline that is meant to expire. Use it only if nothing that the test asserts must finish before it expires."""
CPU_EXPIRY = 2
"""CPU time after which a program that never ends is killed."""
NONE = 0.0
"""A deadline that expires at once: whatever would have to wait gives up."""
LOOK = 0.02
"""Interval between two checks of a condition."""
RAY = {
    "RAY_gcs_server_request_timeout_seconds": str(int(CALL)),
    "RAY_worker_register_timeout_seconds": str(int(CALL)),
    "RAY_agent_register_timeout_ms": str(int(1000 * CALL)),
    "RAY_gcs_rpc_server_connect_timeout_s": str(int(CALL)),
    "RAY_health_check_timeout_ms": str(int(1000 * CALL)),
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(int(CALL)),
}
"""Environment variables for Ray's own deadlines, each in the unit that Ray expects."""


def now() -> float:
    """Return the seconds of a clock, to say how long something took. No test asserts it."""
    return time.monotonic()


def until(holds: Callable[[], bool], what: str, seconds: float = CALL, found: Callable[[], object] = str) -> None:
    """Wait until the condition holds.

    Raises:
        TimeoutError: the condition did not hold within `seconds`. The message contains `what` was expected and what was
            `found`.
    """
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:g} s: {what} {found()}")
        time.sleep(LOOK)


async def comes_true(holds: Callable[[], bool], what: str, seconds: float = CALL) -> None:
    """Do the same as `until` without blocking the event loop."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(LOOK)
