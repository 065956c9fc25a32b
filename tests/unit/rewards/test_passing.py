"""When a response counts as passed: the bars of rewards, of sums, of judges and of environments."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.schema.roles import RewardConfig
from roll.config.shipped import known_rewards
from roll.errors import ConfigError
from roll.rewards.base import RewardTraits, load_reward, reward_of, traits_of
from roll.rewards.judges.judge import answer_pattern
from roll.rewards.passing import USUAL, Bar, Bars, bars_of, bars_of_judge, passed
from roll.rewards.verdicts import PartTraits, RewardPart, summed
from roll.rewards.verdicts import parts_of as parts_of_domain
from roll.types import Episode, Prompt, RewardOutcome, RewardResult
from tests.unit.rewards.running import PROMPT
from tests.unit.rollout.build import make_episode

SCALES = {
    "math_steps": (1.0, "answer"),
    "crossthinkqa": (0.5, "answer"),
    "right_prefix": (1.0, "right"),
    "grounding": (0.5, ""),
}
WITHOUT = ("no_reward", "length_penalty", "repetition_penalty", "detection")


def bars(domain: str, keys: dict[str, Any]) -> Bars:
    section = RewardConfig.model_validate(keys)
    declared = [traits_of(load_reward(part.reward)) for part in parts_of_domain(domain, section)]
    return bars_of(domain, section, [PartTraits(False, False, one.passes_at, one.passes_by) for one in declared])


def scored(result: RewardResult, **metrics: float) -> Episode:
    made = make_episode([5])
    return Episode(made.trajectories, result, metrics=metrics)


def passes(domain: str, keys: dict[str, Any], response: str, row: dict[str, Any]) -> bool:
    """Return whether a response passes, scored as a reward process does."""
    section = RewardConfig.model_validate(keys)
    parts = parts_of_domain(domain, section)
    prompt = Prompt(0, PROMPT.token_ids, "", domain, row)
    results = [[load_reward(part.reward)(prompt, response, row, **part.reward_args)] for part in parts]
    return passed(scored(summed(parts, results)[0]), bars(domain, keys))


@pytest.mark.parametrize("name", [name for name in known_rewards() if name not in ("llm_judge", "reward_model")])
def test_every_shipped_reward_declares_its_bar(name: str) -> None:
    found = traits_of(load_reward(name))
    expected = (None, "") if name in WITHOUT else SCALES.get(name, (1.0, ""))
    assert (found.passes_at, found.passes_by) == expected


@pytest.mark.parametrize(
    ("value", "keys", "expected"),
    [
        (1.0, {}, True),
        (0.999, {}, False),
        (1 / 3, {}, False),
        (0.5, {"passes_at": 0.5}, True),
        (0.49, {"passes_at": 0.5}, False),
        (-1.0, {"passes_at": -1.0}, True),
        (0.0, {"passes_at": 0.0}, True),
        (2.0, {"passes_at": 10}, False),
    ],
)
def test_a_reward_passes_at_its_bar(value: float, keys: dict[str, Any], expected: bool) -> None:
    assert passed(scored(RewardResult(value)), bars("exact_match", keys)) is expected


@pytest.mark.parametrize("outcome", [one for one in RewardOutcome if one is not RewardOutcome.SCORED])
def test_only_scored_responses_pass(outcome: RewardOutcome) -> None:
    assert not passed(scored(RewardResult(1.0, outcome)), USUAL)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("2 + 3 = 5, so \\boxed{5}", True),
        ("2 + 3 = 6, so \\boxed{5}", True),
        ("1 + 1 = 2 and 2 + 2 = 4, so \\boxed{4}", False),
        ("\\boxed{5}", True),
        ("\\boxed{6}", False),
        ("no idea", False),
    ],
)
def test_math_steps_passes_by_its_answer(response: str, expected: bool) -> None:
    assert passes("math_steps", {}, response, {"ground_truth": "5"}) is expected
    assert (
        passes("sum", {"parts": {"steps": {"reward": "math_steps", "weight": 0.1}}}, response, {"ground_truth": "5"})
        is expected
    )


@pytest.mark.parametrize(
    ("mode", "response", "expected"),
    [
        ("soft", "The answer is B.", True),
        ("soft", "\\boxed{B}", True),
        ("soft", "\\boxed{C}", False),
        ("loose", "The answer is B.", True),
        ("strict", "The answer is B.", False),
        ("strict", "\\boxed{B}", True),
    ],
)
def test_crossthinkqa_passes_by_its_answer(mode: str, response: str, expected: bool) -> None:
    keys = {"reward_args": {"reward_type": mode, "response_length_penalty_coef": 1.0}}
    assert passes("crossthinkqa", keys, response, {"ground_truth": "B"}) is expected


@pytest.mark.parametrize(("response", "expected"), [("abcd", True), ("abc", False), ("abcde", False), ("x", False)])
def test_right_prefix_passes_only_if_right(response: str, expected: bool) -> None:
    assert passes("right_prefix", {}, response, {"ground_truth": "abcd"}) is expected


SUM = {
    "parts": {"right": {"reward": "exact_match", "weight": 0.2}, "brief": {"reward": "length_penalty", "weight": 5.0}}
}


def test_passing_ignores_penalties_in_a_sum() -> None:
    assert passes("sum", SUM, "a", {"ground_truth": "a"}) and not passes("sum", SUM, "b", {"ground_truth": "a"})


def test_each_part_of_a_sum_reaches_its_bar() -> None:
    both = {"parts": {"right": {"reward": "exact_match"}, "choice": {"reward": "multiple_choice"}}}
    assert passes("sum", both, "B", {"ground_truth": "B"})
    assert not passes("sum", both, "(B)", {"ground_truth": "B"})
    own = {"parts": {"right": {"reward": "exact_match", "passes_at": 0.0}, "choice": {"reward": "multiple_choice"}}}
    assert passes("sum", own, "(B)", {"ground_truth": "B"})


def test_a_key_of_the_domain_bars_the_sum() -> None:
    assert bars("sum", SUM | {"passes_at": 0.3}) == (Bar(0.3),)


@pytest.mark.parametrize("name", WITHOUT)
def test_a_penalty_has_no_accuracy_without_a_key(name: str) -> None:
    assert bars(name, {}) == () and bars(name, {"passes_at": -0.1}) == (Bar(-0.1),)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((None, None, None), USUAL),
        ((None, None, "same_answer"), USUAL),
        ((r"verdict: (\w+)", 5.0, None), USUAL),
        ("\\bright\\b", USUAL),
        ((r"mark (\d+)", None, "my.txt"), ()),
    ],
)
def test_a_judge_passes_at_its_largest_verdict(keys: Any, expected: Bars) -> None:
    asked: tuple[Any, Any, Any] = (keys, None, "my.txt") if isinstance(keys, str) else keys
    assert bars_of_judge(answer_pattern(*asked)) == expected


def test_an_episode_passes_by_its_success() -> None:
    by_success = (Bar(1.0, ("environment/success",)),)
    assert passed(scored(RewardResult(0.2), **{"environment/success": 1.0}), by_success)
    assert not passed(scored(RewardResult(9.0), **{"environment/success": 0.0}), by_success)
    assert passed(scored(RewardResult(1.0)), by_success) and not passed(scored(RewardResult(0.9)), by_success)


@pytest.mark.parametrize(
    "traits", [{"passes_at": float("nan")}, {"passes_at": True}, {"passes_at": "1"}, {"passes_by": None}]
)
def test_a_malformed_bar_is_a_fault(traits: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.rewards.functions.exact_match.exact_match.declared_traits", RewardTraits(**traits))
    with pytest.raises(ConfigError, match="rewards.d.reward"):
        reward_of(RewardPart("rewards.d", "", "exact_match", {}, False, 1.0, 0.0))
