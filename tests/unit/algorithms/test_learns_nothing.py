"""Combinations of estimator, normalisation and filter whose advantages are always 0 are refused, and no others are
refused for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from roll.algorithms.advantages import Normalisation, exact_advantages
from roll.algorithms.methods import ESTIMATORS, EstimatorTraits, Method
from roll.algorithms.moments import RunningMoments
from roll.config.checks.algorithm import credit_faults
from roll.config.checks.domains import filter_faults
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RewardConfig
from roll.rewards.verdicts import normalised
from roll.runs.rlvr.wiring import kept_groups
from roll.types import RewardResult, RolloutGroup
from tests.unit.algorithms.build import build
from tests.unit.pipeline.conftest import configured
from tests.unit.rollout.build import make_episode, make_group

__all__ = ["configured"]
Configured = Callable[..., Any]
SAMPLES, GROUPS, WEIGHTS = 4, 12, {"right": 1.0, "brief": 0.5}
NOTHING = (
    "every advantage would be 0",
    "every reward would be 0",
    "which the bounds exclude",
    "no group's standard deviation",
)
"""Words of the faults that say that nothing would be learnt."""
FILTERS: list[dict[str, Any] | None] = [
    None,
    {"type": "no_filter"},
    *(
        {"type": "mean_filter", "filter_args": bounds}
        for bounds in (
            {"threshold_down": 0.1},
            {"threshold_down": 0.0, "threshold_up": 0.9},
            {"threshold_down": -0.5, "threshold_up": 0.9},
            {"threshold_up": 0.9},
            {"threshold_up": 0.0},
            {"threshold_down": -0.9, "threshold_up": -0.1},
        )
    ),
    *({"type": "std_filter", "filter_args": {"std_threshold": bound}} for bound in (0.0, 0.3, 1.5)),
]
SCOPES = (None, "batch", "group", "domain", "running")


def combination(base: RlvrConfig, estimator: Method[EstimatorTraits], **keys: Any) -> RlvrConfig:
    """Return a configuration with two parts, without a check. `normalise` and `filter` are keys of its reward."""
    parts = {name: {"reward": "exact_match", "weight": weight} for name, weight in WEIGHTS.items()}
    section = {"parts": parts, "normalise": keys.pop("normalise"), "query_filter_config": keys.pop("filter")}
    rewards = {"sums": RewardConfig.model_validate(section)}
    return base.model_copy(
        update={
            "num_return_sequences_in_group": SAMPLES,
            "rewards": rewards,
            "adv_estimator": estimator,
            "norm_std_type": None,
            **keys,
        }
    )


def drawn(draw: np.random.Generator, normalise: str) -> list[list[RewardResult]]:
    """Return results of GROUPS groups. The values lie in [-5, 5], and differ within each group."""
    groups = []
    for shift in draw.uniform(-2, 2, GROUPS):
        values = {name: shift + draw.uniform(-3, 3, SAMPLES) for name in WEIGHTS}
        parts = [{name: float(values[name][row]) for name in WEIGHTS} for row in range(SAMPLES)]
        results = [RewardResult(sum(WEIGHTS[name] * part[name] for name in WEIGHTS), parts=part) for part in parts]
        groups.append(normalised(WEIGHTS, results) if normalise == "group" else results)
    return groups


def moved(results: Sequence[RewardResult], by: float) -> RolloutGroup:
    """Return a group of these results, moved by an amount like rounding, which must not decide whether the group is
    kept.
    """
    return make_group(0, [make_episode([5], one.value + by) for one in results], domain="sums")


def learns(config: RlvrConfig, seed: int) -> bool:
    """Return whether a step of random groups has an advantage that is not 0, up to rounding."""
    keep, section = kept_groups(config), config.rewards["sums"]
    groups = drawn(np.random.default_rng(seed), section.normalise)
    kept = [
        [one.value for one in results]
        for results in groups
        if all(keep(moved(results, by)) for by in (-1e-9, 0.0, 1e-9))
    ]
    if not kept:
        return False
    scores = build([(reward, index, ".xx") for index, rewards in enumerate(kept) for reward in rewards])
    scores = replace(scores, running=RunningMoments().joined(scores.rewards), domains=scores.groups % 2)
    norm = Normalisation(config.norm_mean_type, config.norm_std_type)
    estimator = config.adv_estimator
    name = "maxrl" if estimator.is_users else estimator.name
    return float(np.abs(exact_advantages(name, scores, norm, estimator.arguments(config))).max()) > 1e-6


def refused_for_nothing(config: RlvrConfig) -> bool:
    faults = [*credit_faults(config), *filter_faults(config)]
    return any(words in fault.problem for fault in faults for words in NOTHING)


USERS = Method("my_package.mine:over_the_mean", EstimatorTraits(divides_by_mean=True))


@pytest.mark.parametrize("estimator", [*ESTIMATORS.values(), USERS], ids=str)
def test_just_what_cannot_learn_is_refused(estimator: Method[EstimatorTraits], configured: Configured) -> None:
    base, cases = configured("tiny_rlvr_lora_zero3"), 0
    own = SCOPES[:-1] if estimator.traits.needs_turns else SCOPES  # the returns of turns have no running moments
    scopes = product(own, own) if estimator.traits.normalises else [(None, None)]
    for (mean, std), normalise, query_filter in product(scopes, ("none", "group"), FILTERS):
        keys = {"norm_mean_type": mean, "norm_std_type": std, "normalise": normalise, "filter": query_filter}
        config = combination(base, estimator, **keys)
        ever = any(learns(config, seed) for seed in range(4))
        assert refused_for_nothing(config) is not ever, keys
        cases += 1
    assert cases >= 2 * len(FILTERS)


def single(base: RlvrConfig, **keys: Any) -> RlvrConfig:
    return base.model_copy(update={"rollout_batch_size": 1, "num_return_sequences_in_group": 1, **keys})


ONE_RESPONSE: list[tuple[str, dict[str, Any], str | None]] = [
    ("reinforce", {"norm_mean_type": "batch"}, "norm_mean_type"),
    ("reinforce", {"norm_mean_type": "domain", "gamma": 0.9}, "norm_mean_type"),
    ("reinforce", {"norm_mean_type": "running"}, None),
    ("reinforce", {"norm_std_type": "batch"}, None),
    ("reinforce", {"whiten_advantages": True}, "whiten_advantages"),
    ("reinforce", {"whiten_advantages": True, "gamma": 0.9}, None),
    ("reinforce_plus_plus", {}, "adv_estimator"),
    ("reinforce_plus_plus", {"gamma": 0.9}, None),
    ("remax", {}, None),
]


@pytest.mark.parametrize(("name", "keys", "place"), ONE_RESPONSE)
def test_a_step_of_one_response_that_cannot_learn(
    name: str, keys: Mapping[str, Any], place: str | None, configured: Configured
) -> None:
    plain = {"norm_mean_type": None, "norm_std_type": None, "gamma": 1.0, "adv_estimator": ESTIMATORS[name]}
    config = single(configured("tiny_rlvr_lora_zero3"), **{**plain, **keys})
    places = [fault.place for fault in credit_faults(config) if NOTHING[0] in fault.problem]
    assert places == ([] if place is None else [place])
    norm = Normalisation(config.norm_mean_type, config.norm_std_type, config.gamma, whiten=config.whiten_advantages)
    one = replace(build([(0.75, 1, ".xx")]), domains=np.zeros(1, np.int32))
    if "running" not in keys.values():
        assert bool(np.any(exact_advantages(name, one, norm))) is (place is None)


def test_gigpo_without_either_weight_is_refused(configured: Configured) -> None:
    weights = {"episode_reward_weight": 0.0, "step_reward_weight": 0.0}
    base = configured("tiny_rlvr_lora_zero3").model_copy(update={"adv_estimator": ESTIMATORS["gigpo"], **weights})
    assert "episode_reward_weight" in [fault.place for fault in credit_faults(base)]
