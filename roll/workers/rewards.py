"""The reward workers: Ray actors that each keep the process of a reward, wherever in the cluster they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roll.config.schema.roles import RewardConfig
from roll.rewards.process import RewardProcess
from roll.strategies.base import Rank
from roll.types import Prompt, RewardResult
from roll.workers.group import WorkerGroup

REPLACED = 30.0
"""Seconds in which a process that a response cost is replaced."""
SLACK = 60.0
"""Seconds for the way there and back."""


class RewardWorker:
    """Hosted by a Ray actor; scores one group at a time."""

    def __init__(self, settings: tuple[str, RewardConfig, float], rank: Rank) -> None:
        """`settings` are the domain, its section, and the seconds in which the process must be ready."""
        self._process = RewardProcess(*settings)

    async def start(self) -> None:
        """Start the process and load the reward function."""
        await self._process.start()

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        """One result for each response."""
        return await self._process.score(prompt, responses)

    async def close(self) -> None:
        """End the process."""
        await self._process.close()


class Rewards:
    """Facade of the reward groups: routes a prompt to its domain's least busy worker."""

    def __init__(self, groups: Mapping[str, WorkerGroup], sections: Mapping[str, RewardConfig]) -> None:
        self._groups, self._sections = groups, sections
        self._waiting = {domain: [0] * len(group) for domain, group in groups.items()}

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        """One result for each response of a prompt."""
        group, waiting = self._groups[prompt.domain], self._waiting[prompt.domain]
        worker = min(range(len(waiting)), key=waiting.__getitem__)
        waiting[worker] += len(responses)
        try:
            # Each response may run to its own deadline, and cost its process.
            seconds = (self._sections[prompt.domain].timeout + REPLACED) * waiting[worker] + SLACK
            return await group.one(worker, "score", prompt, responses, seconds=seconds)
        finally:
            waiting[worker] -= len(responses)
