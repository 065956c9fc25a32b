"""The reward workers: Ray actors anywhere in the cluster, each of which runs reward functions in a child process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from roll.backend import Rank
from roll.config.schema.roles import RewardConfig
from roll.hosted.worker import SLACK, HostedSettings, HostedWorker
from roll.ray.group import WorkerGroup
from roll.ray.replacement import Replaced
from roll.rewards.process import RewardProcess
from roll.rewards.verdicts import normalised
from roll.types import Prompt, RewardResult

REPLACED = 30.0
"""Time in seconds for replacing a child process that was broken by a response."""


class RewardSettings(HostedSettings[RewardConfig]):
    """Settings of `RewardWorker`."""

    def build(self, rank: Rank) -> RewardWorker:
        """See `Settings`."""
        return RewardWorker(self)


class RewardWorker(HostedWorker[RewardProcess]):
    """Scores responses in a Ray actor."""

    def __init__(self, settings: RewardSettings) -> None:
        super().__init__(RewardProcess(settings.domain, settings.section, settings.start_seconds))

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        """Return one result for each response."""
        return await self._process.score(prompt, responses)


class ModelReward(Protocol):
    """A model that scores a domain instead of reward functions."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        """Return one result for each response, in order."""
        ...


class Rewards:
    """Facade of the reward groups: routes a prompt to the least busy worker of its domain, or to the domain's model.

    If a worker dies, its replacement scores the unanswered responses.
    """

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup[RewardWorker]],
        sections: Mapping[str, RewardConfig],
        start_seconds: float,
        models: Mapping[str, ModelReward] | None = None,
    ) -> None:
        """
        Args:
            start_seconds: deadline for each part of the start of a replacement worker.
            models: models for the domains that have no group.
        """
        self._workers = {domain: Replaced(group, start_seconds) for domain, group in groups.items()}
        self._sections, self._models = sections, models or {}
        self._waiting = {domain: [0] * len(group) for domain, group in groups.items()}

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        """Return a result for each response to a prompt. If the domain `compares`, pass the group's at once."""
        if prompt.domain in self._models:
            return await self._models[prompt.domain].score(prompt, responses)
        workers, waiting = self._workers[prompt.domain], self._waiting[prompt.domain]
        worker = min(range(len(waiting)), key=waiting.__getitem__)
        waiting[worker] += len(responses)
        try:
            seconds = longest(self._sections[prompt.domain], waiting[worker])
            return await workers.one(worker, seconds, RewardWorker.score, prompt, responses)
        finally:
            waiting[worker] -= len(responses)

    def compares(self, prompt: Prompt) -> bool:
        """Return whether a reward of the prompt's domain needs all responses of the group at once."""
        section = self._sections[prompt.domain]
        return section.group or any(part.group for part in section.parts.values())

    def combined(self, prompt: Prompt, results: Sequence[RewardResult]) -> Sequence[RewardResult]:
        """Combine the results of a group. With `normalise: group`, a reward is the sum of its normalised parts."""
        section = self._sections[prompt.domain]
        if section.normalise == "none":
            return results
        return normalised({name: part.weight for name, part in section.parts.items()}, results)


def longest(section: RewardConfig, responses: int) -> float:
    """Return the longest time in seconds for scoring these responses: every call times out and breaks its process."""
    tries = 1 if section.concurrency == 1 else 2  # once concurrently with others, once alone
    return (section.timeout + REPLACED) * responses * max(len(section.parts), 1) * tries + SLACK
