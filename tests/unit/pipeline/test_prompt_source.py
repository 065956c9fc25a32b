"""The source of training prompts: what a solve rate is, and how the keys reach the curriculum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from roll.data.curriculum import Curriculum, CurriculumSampler
from roll.data.prompts import PromptSampler, Tasks
from roll.errors import BadInput
from roll.rewards.passing import Bar
from roll.runs.changed_keys import of_keys
from roll.runs.rlvr.prompt_source import PassedShare, check_curriculum, source_of
from roll.types import Episode, RewardOutcome, RolloutGroup, StopReason
from tests.faults import coded
from tests.unit.rollout.build import make_episode, make_group

RLVR = "tiny/tiny_rlvr_lora_zero3"
TASKS = Tasks(("sums",), {"sums": 6})
Configured = Callable[..., Any]

EPISODES: list[tuple[list[Episode], float | None]] = [
    ([make_episode([5], 1.0), make_episode([5], 0.0)], 0.5),
    # The bar is 0.8, whatever the scale of the reward.
    ([make_episode([5], value) for value in (-3.0, 0.79, 0.8, 7.5)], 0.5),
    # A response whose answer cannot be parsed is wrong, even with a high `failed_value`.
    ([make_episode([5], 1.0), make_episode([5], 1.0, outcome=RewardOutcome.UNPARSABLE)], 0.5),
    # A response without a verdict does not count.
    ([make_episode([5], 1.0), make_episode([5], 0.0, outcome=RewardOutcome.CRASHED)], 1.0),
    ([make_episode([5], 1.0), make_episode([5], 0.0, stop=StopReason.ABORTED)], 1.0),
    ([make_episode([5], 0.0, outcome=RewardOutcome.TIMED_OUT)], None),
]


@pytest.mark.parametrize(("episodes", "expected"), EPISODES)
def test_solve_rate_is_the_share_that_passed(episodes: list[Episode], expected: float | None) -> None:
    rate = PassedShare({"sums": (Bar(0.8),), "other": (Bar(-9.0),)})
    assert rate(make_group(0, episodes)) == expected


def test_solve_rate_uses_bars_of_the_domain() -> None:
    rate = PassedShare({"sums": (Bar(0.8),), "style": (Bar(3.0),)})
    assert rate(make_group(0, [make_episode([5], 2.0), make_episode([5], 4.0)], domain="style")) == 0.5


def test_a_domain_without_a_bar_is_refused(configured: Configured) -> None:
    bars = {"sums": (Bar(1.0),), "style": ()}
    many = Tasks(("sums", "style"), {"sums": 900, "style": 100})
    check_curriculum(configured(RLVR), many, bars)
    with pytest.raises(BadInput) as refused:
        check_curriculum(configured(RLVR, "+curriculum={}"), many, bars)
    assert coded(refused.value.faults) == [("missing", "rewards.style.passes_at")]


@pytest.mark.parametrize(("ratio", "in_flight"), [("0", 64), ("0.5", 96), ("2", 192)])
def test_too_few_prompts_to_choose_are_refused(ratio: str, in_flight: int, configured: Configured) -> None:
    config = configured(RLVR, "+curriculum={}", f"async_generation_ratio={ratio}")
    check_curriculum(config, Tasks(("sums",), {"sums": in_flight + 1}), {"sums": (Bar(1.0),)})
    with pytest.raises(BadInput) as refused:
        check_curriculum(config, Tasks(("sums",), {"sums": in_flight}), {"sums": (Bar(1.0),)})
    [fault] = refused.value.faults
    assert coded([fault]) == [("no_effect", "curriculum")] and f"{in_flight} prompts" in fault.problem


def test_keys_reach_the_curriculum(configured: Configured) -> None:
    """A group with a rate of 0.5 after one with 1, a weight of 0.25: 0.875, which is hard at most."""
    keys = "+curriculum={hard_at_most: 0.875, solved_at_least: 0.95, update_rate: 0.25, shares: {hard: 0, unseen: 2}}"
    source, curriculum = source_of(configured(RLVR, keys), TASKS, {"sums": (Bar(1.0),)})
    assert isinstance(source, CurriculumSampler) and isinstance(curriculum, Curriculum)
    for rewards in ((1.0, 1.0), (1.0, 0.0)):
        prompts = source.draw(6)
        episodes = [make_episode([5], reward) for reward in rewards]
        curriculum.observe([RolloutGroup(prompt, episodes) for prompt in prompts])
    assert curriculum.metrics()["curriculum/solve_rate"] == 0.875
    assert curriculum.metrics()["curriculum/hard_fraction"] == 1
    assert curriculum.metrics()["curriculum/missing_share"] == pytest.approx(
        # Unseen, hard, learnable and solved have the shares 2, 0, 0.5 and 0.1, and all six prompts were solved.
        2.5 / 2.6
    )
    plain, none = source_of(configured(RLVR), TASKS, {})
    assert isinstance(plain, PromptSampler) and none is None


def test_curriculum_cannot_come_or_go_on_resume(configured: Configured) -> None:
    without, of_one = of_keys(configured(RLVR)), of_keys(configured(RLVR, "+curriculum={}"))
    changed = of_keys(configured(RLVR, "+curriculum={hard_at_most: 0.2}"))
    assert without["curriculum"] != of_one["curriculum"] == changed["curriculum"]
