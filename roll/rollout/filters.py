"""Filters for dynamic sampling: decide which groups are kept, and which are dropped and replaced. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from statistics import fmean, stdev

from roll.rollout.batch import rewards_differ, usable
from roll.types import RolloutGroup

Keep = Callable[[RolloutGroup], bool]
"""Returns whether to keep a group."""


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
