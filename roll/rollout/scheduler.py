"""Keeps prompts in flight and hands over finished groups, oldest first.

    sampler ──draw──▶ episodes in flight (at most (1 + async_generation_ratio) x batch) ──take──▶ loop

With ratio 0 all of a step's groups are drawn, finished and handed over before the trainer moves: synchronous
training. With ratio r, r batches go on generating while the trainer works. Groups leave in the order in which they
were drawn, so no group waits longer than the ratio allows, none is thrown away, and a run can be repeated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from roll.rollout.episode import Generator, Scorer, episode, prompt_seed
from roll.types import Prompt, RolloutGroup, Sampling

TRAINING = 0
"""Seed stream of training prompts."""


class PromptSource(Protocol):
    """Where prompts come from; its position can be saved."""

    def draw(self, count: int) -> list[Prompt]:
        """The next prompts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, JSON-able."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position."""
        ...


@dataclass
class _InFlight:
    position: dict[str, Any]
    """The source's state before this prompt was drawn."""
    task: asyncio.Task[RolloutGroup]


class RolloutScheduler:
    """The rollout side of the loop. Must be used inside one event loop, and closed."""

    def __init__(
        self,
        source: PromptSource,
        generator: Generator,
        scorer: Scorer,
        sampling: Sampling,
        batch_size: int,
        async_generation_ratio: float,
        seed: int | None,
    ) -> None:
        """`seed` gives every prompt's samples a seed of their own; None leaves randomness to the engine."""
        self._source, self._generator, self._scorer, self._sampling = source, generator, scorer, sampling
        self._batch_size = batch_size
        self._capacity = batch_size + round(async_generation_ratio * batch_size)
        self._seed = seed
        self._in_flight: deque[_InFlight] = deque()

    async def take(self) -> list[RolloutGroup]:
        """The oldest `batch_size` groups, finished and scored.

        Raises:
            RollError: what an episode raised; the others are cancelled when it is closed.
        """
        while len(self._in_flight) < self._capacity:
            self._admit()
        taken = [self._in_flight[index].task for index in range(self._batch_size)]
        groups = await asyncio.gather(*taken)
        for _ in taken:
            self._in_flight.popleft()
        return list(groups)

    def _admit(self) -> None:
        position = self._source.state_dict()
        [prompt] = self._source.draw(1)
        seed = None if self._seed is None else prompt_seed(self._seed, TRAINING, prompt.prompt_id)
        task = asyncio.create_task(episode(prompt, self._generator, self._scorer, self._sampling, seed))
        self._in_flight.append(_InFlight(position, task))

    def state_dict(self) -> dict[str, Any]:
        """Where to go on: at the oldest prompt that was drawn but not handed over."""
        return self._in_flight[0].position if self._in_flight else self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; nothing may be in flight."""
        assert not self._in_flight, "the scheduler is already running"
        self._source.load_state_dict(state)

    async def aclose(self) -> None:
        """Give up what is in flight."""
        for flight in self._in_flight:
            flight.task.cancel()
        await asyncio.gather(*(flight.task for flight in self._in_flight), return_exceptions=True)
        self._in_flight.clear()
