"""Ends work when a concurrent watch fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def guarded(watch: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run the watch while the block lasts. Its error ends the work and is raised in place of it."""
    failure = None
    try:
        async with asyncio.TaskGroup() as both:
            watching = both.create_task(watch)
            yield
            watching.cancel()
    except BaseExceptionGroup as failures:
        failure = failures.exceptions[0]
    if failure is not None:  # raised here, so that it keeps its own cause
        raise failure
