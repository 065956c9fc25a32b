"""Waits for the samples of a request, which end one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def as_they_end(samples: Iterable[Coroutine[Any, Any, T]]) -> AsyncGenerator[list[T], None]:
    """Run all samples concurrently, and yield the results of those that ended at about the same time.

    Close the generator (`aclosing`) to cancel the samples that have not ended.
    """
    tasks = [asyncio.create_task(sample) for sample in samples]
    ended: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()
    for task in tasks:
        task.add_done_callback(ended.put_nowait)
    try:
        left = len(tasks)
        while left:
            together = [await ended.get()]
            together += [ended.get_nowait() for _ in range(ended.qsize())]
            left -= len(together)
            yield [task.result() for task in together]
    finally:
        for task in tasks:
            task.cancel()
