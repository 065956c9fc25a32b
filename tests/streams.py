"""Collect a stream of completions, which arrive as they finish, and sort them by sample number."""

from __future__ import annotations

from collections.abc import AsyncIterator

from roll.types import Completion, NumberedCompletions


async def whole(stream: AsyncIterator[NumberedCompletions]) -> list[Completion]:
    """Wait for all completions of a prompt, and return them in the order of their sample numbers."""
    found: dict[int, Completion] = {}
    async for ended in stream:
        assert not found.keys() & dict(ended).keys(), "a sample ends once"
        found |= ended
    assert sorted(found) == list(range(len(found)))
    return [found[number] for number in range(len(found))]
