"""Cancels work when a concurrent check fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def guarded(watch: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """A context in which `watch` runs concurrently. If `watch` raises an error, the block is cancelled and that error
    is raised.
    """
    failure = None
    try:
        async with asyncio.TaskGroup() as both:
            watching = both.create_task(watch)
            yield
            watching.cancel()
    except BaseExceptionGroup as failures:
        failure = failures.exceptions[0]
    if failure is not None:  # raised here, so that its traceback does not show the task group's error
        raise failure
