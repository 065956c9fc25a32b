"""Builds the group filters, which tell the scheduler whether to keep a group."""

from __future__ import annotations

from math import inf

from roll.config.schema.rlvr import DynamicSamplingConfig, RlvrConfig
from roll.config.schema.roles import QueryFilterConfig
from roll.rollout.batch import rewards_differ
from roll.rollout.filters import ByDomain, Keep, MeanBetween, StdAbove, everything


def most_batches(config: RlvrConfig) -> int | None:
    """Return the largest number of batches that may be generated for a step; None if no filter replaces groups."""
    bound = config.dynamic_sampling
    if bound is None and any(_replaces(reward.query_filter_config) for reward in config.rewards.values()):
        bound = DynamicSamplingConfig.model_validate({})
    return bound and bound.max_num_gen_batches


def kept_groups(config: RlvrConfig) -> Keep:
    """Return the group filter: the filter of the group's domain, or else the filter of dynamic sampling if that is on."""
    filters = {domain: _filter(reward.query_filter_config) for domain, reward in config.rewards.items() if reward.query_filter_config}
    return ByDomain(filters, rewards_differ if config.dynamic_sampling else everything)


def _replaces(query_filter: QueryFilterConfig | None) -> bool:
    return query_filter is not None and query_filter.type != "no_filter"


def _filter(query_filter: QueryFilterConfig) -> Keep:
    bounds = query_filter.filter_args
    match query_filter.type:
        case "no_filter":
            return everything
        case "mean_filter":
            low, high = bounds.threshold_down, bounds.threshold_up
            return MeanBetween(-inf if low is None else low, inf if high is None else high)
        case "std_filter":
            assert bounds.std_threshold is not None, "the configuration was checked"
            return StdAbove(bounds.std_threshold)
