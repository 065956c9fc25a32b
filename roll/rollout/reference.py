"""Reference log-probs of a step: computed in one call once the step has all its groups, or group by group as they
finish.

scheduler ──group finished──▶ ReferenceAhead.finished ──▶ reference computes one group at a time, while others are
generated loop ──groups of the step──▶ ReferenceAhead.of ──▶ waits for the groups that are not computed yet
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from roll.rollout.batch import Shaping, experience
from roll.rollout.filters import usable
from roll.types import Floats, RolloutGroup, Sequences

LogProbs = Callable[[Sequences], Awaitable[Floats]]
"""Computes the reference's log-probs: [T] for sequences of T tokens, 0 for tokens outside the loss."""


class StepReference(Protocol):
    """Provides the reference log-probs of each step."""

    def finished(self, group: RolloutGroup) -> None:
        """Announce a finished group that a later step will use."""
        ...

    async def of(self, groups: Sequence[RolloutGroup], sequences: Sequences) -> Floats:
        """Return the reference's log-probs [T] for a step's sequences, built from these groups. Raises RollError."""
        ...

    async def aclose(self) -> None:
        """Cancel requests in progress."""
        ...


class ReferenceAtOnce:
    """Computes all sequences of a step in one call, so that they are packed densely."""

    def __init__(self, log_probs: LogProbs) -> None:
        self._log_probs = log_probs

    def finished(self, group: RolloutGroup) -> None:
        """See `StepReference`."""

    async def of(self, groups: Sequence[RolloutGroup], sequences: Sequences) -> Floats:
        """See `StepReference`."""
        return await self._log_probs(sequences)

    async def aclose(self) -> None:
        """See `StepReference`."""


@dataclass(frozen=True)
class _ReferenceCall:
    group: RolloutGroup
    """A reference to the group, so that its id is not reused."""
    task: asyncio.Task[Floats]


class ReferenceAhead:
    """Computes each group as soon as it is finished. For a reference that has its own devices.

    Each group is computed in a separate call, so that results do not depend on the order in which groups finish.
    """

    def __init__(self, log_probs: LogProbs, shaping: Shaping) -> None:
        """`shaping` must be the one that the steps use."""
        self._log_probs, self._shaping = log_probs, shaping
        self._asked: dict[int, _ReferenceCall] = {}
        # One call at a time: a call that waits in the reference's queue would use up its deadline there.
        self._turn = asyncio.Lock()

    def finished(self, group: RolloutGroup) -> None:
        """See `StepReference`. Groups are computed in the order in which they finish."""
        self._asked[id(group)] = _ReferenceCall(group, asyncio.create_task(self._of_one(group)))

    async def of(self, groups: Sequence[RolloutGroup], sequences: Sequences) -> Floats:
        """See `StepReference`."""
        return np.concatenate([await self._asked.pop(id(group)).task for group in groups])

    async def _of_one(self, group: RolloutGroup) -> Floats:
        if not usable(group):
            return np.zeros(0, np.float32)
        async with self._turn:
            step = await asyncio.to_thread(experience, [group], self._shaping)
            return await self._log_probs(step.sequences)

    async def aclose(self) -> None:
        """See `StepReference`."""
        tasks = [asked.task for asked in self._asked.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._asked.clear()
