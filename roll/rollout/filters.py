"""Decides which episodes have a verdict, and which groups are kept, or dropped and replaced. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from statistics import fmean, stdev

from roll.types import NO_VERDICT, Episode, RolloutGroup, StopReason

Keep = Callable[[RolloutGroup], bool]
"""Returns whether to keep a group."""
BROKEN_OFF = (StopReason.ABORTED, StopReason.DEADLINE, StopReason.ENVIRONMENT_FAILED)
"""Stop reasons that the policy did not cause. An episode with one of them has no verdict."""


def usable(group: RolloutGroup) -> list[Episode]:
    """Return the group's episodes that have a verdict; no episodes if the group has a baseline without a verdict."""
    if group.baseline is not None and not has_verdict(group.baseline):
        return []
    return [episode for episode in group.episodes if has_verdict(episode)]


def rewards_differ(group: RolloutGroup) -> bool:
    """Whether the rewards of the group differ. If they are equal, a comparison within the group has no gradient."""
    return len({episode.reward.value for episode in usable(group)}) > 1


def failure(group: RolloutGroup) -> str | None:
    """Return the error of the first episode whose environment broke in every attempt; None if there is no such episode.

    A group with such an episode is replaced.
    """
    broken = [episode.reward.note for episode in group.episodes if episode.stop is StopReason.ENVIRONMENT_FAILED]
    return broken[0] if broken else None


def has_verdict(episode: Episode) -> bool:
    """Whether the episode's reward is a verdict on the policy."""
    return episode.reward.outcome not in NO_VERDICT and not any(
        trajectory.stop in BROKEN_OFF for trajectory in episode.trajectories
    )


@dataclass(frozen=True)
class MeanBetween:
    """Keeps a group if its mean score is strictly between two bounds, like ROLL's `mean_filter`."""

    low: float = -inf
    high: float = inf

    def __call__(self, group: RolloutGroup) -> bool:
        rewards = [episode.reward.graded for episode in usable(group)]
        return bool(rewards) and self.low < fmean(rewards) < self.high


@dataclass(frozen=True)
class StdAbove:
    """Keeps a group whose sample standard deviation (n - 1) of scores is above a bound, as ROLL's `std_filter`."""

    low: float

    def __call__(self, group: RolloutGroup) -> bool:
        rewards = [episode.reward.graded for episode in usable(group)]
        return len(rewards) > 1 and stdev(rewards) > self.low


def everything(group: RolloutGroup) -> bool:
    """Keeps every group."""
    return True


@dataclass(frozen=True)
class ByDomain:
    """Applies the filter of the group's domain."""

    filters: Mapping[str, Keep]
    """Filters by domain."""
    others: Keep = rewards_differ
    """Filter of all other domains."""

    def __call__(self, group: RolloutGroup) -> bool:
        return self.filters.get(group.prompt.domain, self.others)(group)
