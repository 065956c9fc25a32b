"""How long a test waits, in seconds, and how it waits for a condition. No other file of the tests names such a number.

A limit ends a test that hangs and says nothing about how fast the code is: each is about twenty times what an idle machine of two cores
needs, so that a slow or busy machine changes no verdict. What is tested gets the same limits for its own deadlines, except for those that
the test wants to expire.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

END = 60.0
"""What was ended is gone."""
CALL = 300.0
"""A call of something that runs has its answer; a condition has come true."""
PROCESS = 600.0
"""A process has imported what it needs, done its work and ended."""
START = 1200.0
"""An engine or a role has started, and has compiled what it needs. A collective operation waits as long: one rank may still be starting."""
RUN = 3600.0
"""A whole run, or all the cases that ranks work through one after another."""
EXPIRY = 1.0
"""A deadline that expires. Use it only where nothing that the test asserts has to be done within it."""
CPU_EXPIRY = 2
"""Seconds of CPU time after which a program that never ends is ended."""
NONE = 0.0
"""What would have to wait gives up at once."""
LOOK = 0.02
"""Between two looks at a condition."""
RAY = {
    "RAY_gcs_server_request_timeout_seconds": str(int(CALL)),
    "RAY_worker_register_timeout_seconds": str(int(CALL)),
    "RAY_agent_register_timeout_ms": str(int(1000 * CALL)),
    "RAY_gcs_rpc_server_connect_timeout_s": str(int(CALL)),
    "RAY_health_check_timeout_ms": str(int(1000 * CALL)),
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(int(CALL)),
}
"""Environment variables of Ray's own deadlines, in the units of each."""


def until(holds: Callable[[], bool], what: str, seconds: float = CALL, found: Callable[[], object] = str) -> None:
    """Wait until the condition holds.

    Raises:
        TimeoutError: it did not within `seconds`. The message is `what` the condition says and what was `found` instead.
    """
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:g} s: {what} {found()}")
        time.sleep(LOOK)


async def comes_true(holds: Callable[[], bool], what: str, seconds: float = CALL) -> None:
    """`until` for a coroutine: the event loop goes on meanwhile."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(LOOK)
