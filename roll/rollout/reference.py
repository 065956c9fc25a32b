"""Reference log-probs of a step: computed at once when its groups are taken, or group by group as they finish.

scheduler ──group finished──▶ ReferenceAhead.finished ──▶ reference, one group at a time, while others are generated
loop ──the step's groups──▶ ReferenceAhead.of ──▶ what is still missing is waited for
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from roll.rollout.batch import Shaping, experience, usable
from roll.types import Floats, RolloutGroup, Sequences

LogProbs = Callable[[Sequences], Awaitable[Floats]]
"""Computes the reference's log-probs: [T] for sequences of T tokens, 0 where no token is learnt."""


class StepReference(Protocol):
    """Reference log-probs of steps."""

    def finished(self, group: RolloutGroup) -> None:
        """Note that a group of a later step is finished."""
        ...

    async def of(self, groups: Sequence[RolloutGroup], sequences: Sequences) -> Floats:
        """Return log-probs [T] for the sequences of the step with these groups.

        Raises:
            RollError: the reference failed.
        """
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
class _Asked:
    group: RolloutGroup
    """A reference to the group, so that its id is not reused."""
    task: asyncio.Task[Floats]


class ReferenceAhead:
    """Computes each group when it is finished, for a reference with its own devices.

    Groups are computed separately, so that results do not depend on the order in which they finish.
    """

    def __init__(self, log_probs: LogProbs, shaping: Shaping) -> None:
        """`shaping` is that of the steps."""
        self._log_probs, self._shaping = log_probs, shaping
        self._asked: dict[int, _Asked] = {}
        self._turn = asyncio.Lock()  # a call's deadline starts when it is made, not when the reference starts to work on it

    def finished(self, group: RolloutGroup) -> None:
        """See `StepReference`. Groups that finished earlier come first."""
        self._asked[id(group)] = _Asked(group, asyncio.create_task(self._of_one(group)))

    async def of(self, groups: Sequence[RolloutGroup], sequences: Sequences) -> Floats:
        """See `StepReference`."""
        return np.concatenate([await self._asked.pop(id(group)).task for group in groups])

    async def _of_one(self, group: RolloutGroup) -> Floats:
        if not usable(group):
            return np.zeros(0, np.float32)
        async with self._turn:
            return await self._log_probs(experience([group], self._shaping).sequences)

    async def aclose(self) -> None:
        """See `StepReference`."""
        tasks = [asked.task for asked in self._asked.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._asked.clear()
