"""Collect a stream of completions, which arrive in the order in which they finish, in the order of their samples."""

from __future__ import annotations

from collections.abc import AsyncIterator

from roll.types import Completion, NumberedCompletions


async def whole(stream: AsyncIterator[NumberedCompletions]) -> list[Completion]:
    """Wait for all completions of a prompt, and return them by sample number."""
    found: dict[int, Completion] = {}
    async for ended in stream:
        assert not found.keys() & dict(ended).keys(), "a sample ends once"
        found |= ended
    assert sorted(found) == list(range(len(found)))
    return [found[number] for number in range(len(found))]
