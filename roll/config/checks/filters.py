"""Checks the keys of filters of groups against each other."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import QueryFilterConfig, RewardConfig
from roll.errors import Fault

READ = {"no_filter": (), "mean_filter": ("threshold_down", "threshold_up"), "std_filter": ("std_threshold",)}
"""By type of filter: the bounds that it reads."""


def filter_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of filters that have no bound, a bound that their type does not read, bounds that drop every group, or groups of one."""
    for domain, reward in config.rewards.items():
        query_filter = reward.query_filter_config
        if query_filter is None:
            continue
        place = f"rewards.{domain}.query_filter_config"
        yield from _bounds(query_filter, f"{place}.filter_args")
        if query_filter.type != "no_filter" and config.num_return_sequences_in_group == 1:
            problem = f"{query_filter.type}, but num_return_sequences_in_group is 1: a filter needs several rewards per prompt"
            yield Fault(place, problem, "set num_return_sequences_in_group to at least 2, or remove this block")
        yield from _zero_means(query_filter, reward, place)
        high = query_filter.filter_args.threshold_up if query_filter.type == "mean_filter" else None
        if config.adv_estimator.traits.divides_by_mean and high is not None and high <= 0:
            problem = (
                f"{high:g}, but adv_estimator {config.adv_estimator} learns only if a group's mean is above 0: every advantage would be 0"
            )
            yield Fault(f"{place}.filter_args.threshold_up", problem, "raise it above 0, or change the estimator")


def _zero_means(query_filter: QueryFilterConfig, reward: RewardConfig, place: str) -> Iterator[Fault]:
    """Yield a fault if no group can pass the filter, because `normalise: group` makes its mean 0 and bounds its standard deviation."""
    if reward.normalise != "group":
        return
    bounds, normalised = query_filter.filter_args, f"rewards.{place.split('.')[1]}.normalise is 'group'"
    low, high = bounds.threshold_down, bounds.threshold_up
    if query_filter.type == "mean_filter" and ((low is not None and low >= 0) or (high is not None and high <= 0)):
        problem = f"mean_filter, but {normalised}: the mean reward of every group would be 0, which the bounds exclude"
        yield Fault(place, problem, "use std_filter, set normalise to none, or remove this block")
    largest = sum(abs(part.weight) for part in reward.parts.values())
    if query_filter.type == "std_filter" and bounds.std_threshold is not None and bounds.std_threshold >= largest > 0:
        problem = (
            f"{bounds.std_threshold:g}, but {normalised}: no group's standard deviation would be above {largest:g}, the sum of weights"
        )
        yield Fault(f"{place}.filter_args.std_threshold", problem, f"set it below {largest:g}, or set normalise to none")


def _bounds(query_filter: QueryFilterConfig, place: str) -> Iterator[Fault]:
    bounds = query_filter.filter_args
    given = {key: value for key, value in bounds if value is not None}
    read = READ[query_filter.type]
    for key in given.keys() - set(read):
        yield Fault(f"{place}.{key}", f"{given[key]:g}, but the type {query_filter.type} does not read it", "remove it, or change the type")
    if read and not given.keys() & set(read):
        yield Fault(place, f"has no bound, but the type is {query_filter.type}", f"set {' or '.join(read)}")
    low, high = bounds.threshold_down, bounds.threshold_up
    if low is not None and high is not None and low >= high:
        problem = f"{low:g} is not below threshold_up {high:g}: every group would be replaced"
        yield Fault(f"{place}.threshold_down", problem, "set it below threshold_up")
