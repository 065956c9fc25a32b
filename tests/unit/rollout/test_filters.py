"""Filters of groups: compared with their definitions on random groups, and used in the scheduler."""

from __future__ import annotations

import asyncio
import math
import random
from itertools import product
from typing import Any

import pytest

from roll.config.schema.rlvr import DynamicSamplingConfig
from roll.config.schema.roles import RewardConfig
from roll.rollout.filters import ByDomain, MeanBetween, StdAbove, everything
from roll.runs.rlvr.wiring import kept_groups, most_batches
from roll.types import RewardOutcome, RolloutGroup
from tests.unit.rollout.build import make_episode, make_group
from tests.unit.rollout.test_scheduler import AlikeFor, Gated, ids, scheduler


def group_of(*rewards: float, lost: int = 0, domain: str = "sums") -> RolloutGroup:
    """Return a group of responses with these rewards, and of `lost` others whose reward function crashed."""
    episodes = [make_episode([5], reward) for reward in rewards]
    return make_group(0, [*episodes, *[make_episode([5], 0.0, outcome=RewardOutcome.CRASHED)] * lost], domain=domain)


def test_both_filters_agree_with_their_definitions() -> None:
    draw = random.Random(3)
    for _ in range(2000):
        rewards = [draw.choice([-1.0, 0.0, 0.25, 0.5, 1.0]) for _ in range(draw.randint(2, 8))]
        low, high, bound = draw.choice([0.0, 0.1, 0.25]), draw.choice([0.5, 0.75, 1.0]), draw.choice([0.0, 0.2, 0.5])
        mean = math.fsum(rewards) / len(rewards)
        spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
        group = group_of(*rewards, lost=draw.randint(0, 2))
        assert MeanBetween(low, high)(group) is (low < mean < high)
        assert StdAbove(bound)(group) is (spread > bound)


def test_the_bounds_themselves_are_dropped() -> None:
    assert [MeanBetween(0.25, 0.75)(group_of(0.0, mean * 2)) for mean in (0.25, 0.5, 0.75)] == [False, True, False]
    assert [StdAbove(0.5)(group_of(0.0, spread * math.sqrt(2))) for spread in (0.49, 0.51)] == [False, True]
    assert not StdAbove(0.0)(group_of(1.0, 1.0))


def test_group_filter_drops_groups_without_enough_verdicts() -> None:
    assert not MeanBetween()(group_of(lost=3)) and not StdAbove(-1.0)(group_of(lost=3))
    assert MeanBetween(0.0, 2.0)(group_of(1.0, lost=2)) and not StdAbove(0.0)(group_of(1.0, lost=2))


def test_each_domain_has_its_own() -> None:
    keep = ByDomain({"sums": MeanBetween(0.0, 1.0), "code": everything}, StdAbove(0.0))
    equal, differing = (0.5, 0.5), (0.0, 1.0)
    kept = {
        (name, rewards)
        for name, rewards in product(("sums", "code", "other"), (equal, differing))
        if keep(group_of(*rewards, domain=name))
    }
    assert kept == {("sums", equal), ("sums", differing), ("code", equal), ("code", differing), ("other", differing)}


class Keys:
    """The keys of an `RlvrConfig` that the filters use."""

    def __init__(self, bound: int | None, **filters: dict[str, Any] | None) -> None:
        self.dynamic_sampling = bound and DynamicSamplingConfig(max_num_gen_batches=bound)
        self.rewards = {
            name: RewardConfig.model_validate({"query_filter_config": keys}) for name, keys in filters.items()
        }


MEAN = {"type": "mean_filter", "filter_args": {"threshold_down": 0.1, "threshold_up": 0.9}}
STD = {"type": "std_filter", "filter_args": {"std_threshold": 0.1}}
NONE = {"type": "no_filter"}


@pytest.mark.parametrize(
    ("keys", "batches", "kept"),
    [
        (Keys(None, sums=None, code=None), None, "all"),
        (Keys(None, sums=NONE, code=None), None, "all"),
        (Keys(5, sums=None, code=None), 5, "sums differing, code differing"),
        (Keys(None, sums=MEAN, code=None), 3, "sums equal, sums differing, code equal, code differing, code solved"),
        (Keys(2, sums=MEAN, code=None), 2, "sums equal, sums differing, code differing"),
        (Keys(2, sums=NONE, code=STD), 2, "sums equal, sums differing, sums solved, code differing"),
    ],
)
def test_the_keys_decide_what_is_kept(keys: Any, batches: int | None, kept: str) -> None:
    assert most_batches(keys) == batches
    keep, rewards = kept_groups(keys), {"equal": (0.5, 0.5), "differing": (0.0, 1.0), "solved": (1.0, 1.0)}
    found = [
        f"{domain} {name}"
        for domain in keys.rewards
        for name in rewards
        if keep(group_of(*rewards[name], domain=domain))
    ]
    assert ", ".join(found) == kept or (kept == "all" and len(found) == 6)


def test_the_scheduler_replaces_what_a_filter_refuses() -> None:
    async def run() -> None:
        never = AlikeFor(lambda prompt_id: False)  # rewards 0 and 1, with mean 0.5
        for keep, expected in ((MeanBetween(0.4, 0.6), [0, 1, 2, 3]), (everything, [0, 1, 2, 3])):
            rollouts, _ = scheduler(Gated(is_open=True), scorer=never, most_batches=2, keep=keep)
            assert ids(await rollouts.take()) == expected and rollouts.metrics()["sampling/dropped_groups"] == 0
        odd = AlikeFor(lambda prompt_id: prompt_id % 2 == 1)  # odd prompts have rewards 0 and 0
        rollouts, _ = scheduler(Gated(is_open=True), scorer=odd, most_batches=3, keep=MeanBetween(high=0.4))
        assert ids(await rollouts.take()) == [1, 3, 5, 7]
        assert rollouts.metrics()["sampling/dropped_groups"] == 4

    asyncio.run(run())
