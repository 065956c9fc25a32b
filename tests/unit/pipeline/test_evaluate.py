"""Metrics of held-out sets, compared with enumeration of all orders and subsets of the samples."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from statistics import fmean

import numpy as np
import pytest

from roll.agents import episode_groups
from roll.evaluation.results import set_result
from roll.rewards.passing import Bar
from roll.rollout.group import Generator, SingleTurns, prompt_seed
from roll.rollout.scheduler import TRAINING
from roll.runs.rlvr.validation import (
    VALIDATION,
    ByItself,
    Evaluator,
    estimate_pass_at_k,
    majority,
    majority_at_k,
    sizes,
    validation_metrics,
)
from roll.types import (
    NO_VERDICT,
    Completion,
    Episode,
    FinishReason,
    Ints,
    NumberedCompletions,
    Prompt,
    RewardOutcome,
    RewardResult,
    RolloutGroup,
    Sampling,
)
from tests.unit.rollout.build import kept_nowhere, make_episode, make_group, make_prompt, make_trajectory, sampled


def group_of(*responses: tuple[str, float], outcome: RewardOutcome = RewardOutcome.SCORED) -> RolloutGroup:
    """Return a group of responses with these texts and rewards. Each response has one token per character."""
    episodes = []
    for text, reward in responses:
        episode = make_episode([5], reward, outcome=outcome)
        episodes.append(type(episode)([make_trajectory(sampled([5] * len(text), text=text))], episode.reward))
    return make_group(0, episodes)


def elected(answers: Sequence[str], passes: Sequence[bool]) -> float:
    """Return the pass rate of the most frequent answer, averaged over ties. Empty answers do not vote."""
    votes = Counter(answer for answer in answers if answer)
    first = [answer for answer in votes if votes[answer] == max(votes.values())]
    shares = [
        fmean(right for answer, right in zip(answers, passes, strict=True) if answer == winner) for winner in first
    ]
    return fmean(shares) if shares else 0.0


@pytest.mark.parametrize(
    ("samples", "ks"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])],
)
def test_k_doubles_up_to_all_samples(samples: int, ks: list[int]) -> None:
    assert sizes(samples) == ks


def test_the_majority_is_elected_as_by_hand() -> None:
    draw = random.Random(5)
    for _ in range(500):
        answers = [draw.choice(["a", "b", "c", ""]) for _ in range(draw.randint(1, 7))]
        passes = [bool(answer) and draw.random() < 0.5 for answer in answers]
        assert majority(answers, passes) == pytest.approx(elected(answers, passes))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
def test_maj_at_k_is_without_bias(k: int) -> None:
    """The mean of `majority_at_k` over all orders of the samples equals the mean of `elected` over all subsets of k
    samples.
    """
    answers, right = ("a", "a", "b", "c", "", "b"), "a"
    every = [majority_at_k(order, [answer == right for answer in order], k) for order in permutations(answers)]
    chosen = [elected(some, [answer == right for answer in some]) for some in combinations(answers, k)]
    assert fmean(every) == pytest.approx(fmean(chosen))


def test_the_metrics_of_a_set() -> None:
    groups = [
        group_of(
            (r"so \boxed{4}", 1.0),
            (r"\boxed{ 4 } it is", 1.0),
            (r"\boxed{5}", 0.0),
            ("<think>\\boxed{5}</think>first\n4", 1.0),
        ),
        group_of(("7", -1.0), ("8", -1.0), ("7", -1.0), ("9", 1.0)),
    ]
    metrics = {name.removeprefix("val/set/"): value for name, value in validation_metrics("set", groups, 4).items()}
    for k in (1, 2, 4):
        assert metrics[f"pass@{k}"] == pytest.approx((estimate_pass_at_k(4, 3, k) + estimate_pass_at_k(4, 1, k)) / 2)
    # First prompt: (4, 4) is right, (5, 4) is a tie, and 4 wins over all. Second: (7, 8) is wrong, (7, 9) a tie, and 7
    # wins over all.
    assert metrics["maj@2"] == pytest.approx(((1 + 0.5) / 2 + (0 + 0.5) / 2) / 2) and metrics["maj@4"] == 0.5
    assert metrics["avg@4"] == pytest.approx((3 - 3 + 1) / 8)
    lengths = [len(segment.text) for group in groups for episode in group.episodes for segment in episode.sampled]
    assert metrics["length_mean"] == pytest.approx(fmean(lengths)) and metrics["length_max"] == max(lengths)
    assert metrics["truncated_fraction"] == 0 and metrics["policy_version"] == 0
    assert set(metrics) == {"pass@1", "pass@2", "pass@4", "maj@2", "maj@4", "avg@4"} | {
        "length_mean",
        "length_max",
        "at_limit_fraction",
        "truncated_fraction",
        "no_verdict_fraction",
        "policy_version",
    }
    assert metrics["no_verdict_fraction"] == 0


def test_parts_of_rewards_have_means() -> None:
    def rewarded(*lenient: float, crashes: bool = False) -> RolloutGroup:
        outcomes = [RewardOutcome.SCORED, RewardOutcome.CRASHED if crashes else RewardOutcome.SCORED]
        rewards = map(RewardResult, (1.0, 0.0), outcomes, ({"lenient": value} for value in lenient))
        return make_group(0, [replace(make_episode([5]), reward=reward) for reward in rewards])

    without = group_of(("1", 1.0), ("2", 1.0))
    groups = [rewarded(0.5, 1.0, crashes=True), rewarded(0.0, 4.0)]
    groups.append(replace(without, prompt=replace(without.prompt, domain="without")))
    assert validation_metrics("set", groups, 2)["val/set/lenient/mean"] == pytest.approx((0.5 + 0 + 0 + 4.0) / 4)
    found = set_result("set", groups, 2).estimates["lenient, mean"]
    assert found.value == pytest.approx(4.5 / 4) and found.low < 4.5 / 4 < found.high


def test_partly_right_responses_pass_only_a_lower_bar() -> None:
    groups = [group_of(("1", 1.0), ("2", 2 / 3), ("3", 1 / 3), ("4", 0.0))]
    assert validation_metrics("set", groups, 4)["val/set/pass@1"] == 0.25
    assert validation_metrics("set", groups, 4, {groups[0].prompt.domain: (Bar(0.5),)})["val/set/pass@1"] == 0.5


def test_a_set_without_an_accuracy_has_only_averages() -> None:
    groups = [group_of(("1", 3.0), ("2", -2.0))]
    names = validation_metrics("set", groups, 2, {groups[0].prompt.domain: ()})
    assert names["val/set/avg@2"] == 0.5 and not any("pass@" in name or "maj@" in name for name in names)


def test_pass_rates_count_prompts_with_accuracy() -> None:
    graded, barred = group_of(("1", 0.3)), group_of(("1", 1.0))
    graded = replace(graded, prompt=replace(graded.prompt, domain="graded"))
    found = validation_metrics("set", [graded, barred], 1, {"graded": ()})
    assert found["val/set/pass@1"] == 1.0 and found["val/set/avg@1"] == pytest.approx(0.65)


def test_what_got_no_verdict_passes_in_no_way() -> None:
    groups = [
        group_of(("1", 1.0), ("1", 1.0), outcome=outcome) for outcome in (RewardOutcome.CRASHED, RewardOutcome.SCORED)
    ]
    metrics = validation_metrics("set", groups, 2)
    assert [metrics[f"val/set/{name}"] for name in ("pass@1", "pass@2", "maj@2", "avg@2")] == [0.5] * 4
    assert metrics["val/set/no_verdict_fraction"] == 0.5


@pytest.mark.parametrize("outcome", sorted(NO_VERDICT))
def test_a_set_without_any_verdict_has_no_result(outcome: RewardOutcome) -> None:
    metrics = validation_metrics("set", [group_of(("1", 1.0), ("1", 1.0), outcome=outcome)], 2)
    assert metrics["val/set/no_verdict_fraction"] == 1
    assert not any("@" in name for name in metrics)


def test_a_domain_without_any_verdict_has_no_accuracy() -> None:
    barred, graded = group_of(("1", 1.0), outcome=RewardOutcome.CRASHED), group_of(("1", 0.3))
    graded = replace(graded, prompt=replace(graded.prompt, domain="graded"))
    metrics = validation_metrics("set", [graded, barred], 1, {"graded": ()})
    assert "val/set/pass@1" not in metrics and metrics["val/set/avg@1"] == pytest.approx(0.15)


class Echo(Generator):
    """Answers with the number of the prompt, and counts the requests by their number of samples."""

    def __init__(self) -> None:
        self.asked: Counter[int] = Counter()

    async def generate(
        self, token_ids: Ints, sampling: Sampling, seed: int | None = None, shown: object = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        self.asked[sampling.samples] += 1
        tokens = np.array([5], np.int32)
        answer = Completion(tokens, None, np.zeros(1, np.int32), FinishReason.STOP, str(token_ids[0]))
        yield list(enumerate([answer] * sampling.samples))

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        return [RewardResult(float(prompt.row["right"])) for _ in responses]

    def compares(self, prompt: Prompt) -> bool:
        return False

    def combined(self, prompt: Prompt, results: Sequence[RewardResult]) -> Sequence[RewardResult]:
        return results


def test_sets_are_answered_each_with_its_own_sampling() -> None:
    echo = Echo()
    prompts = [Prompt(number, np.array([number], np.int32), "", "d", {"right": number % 2}) for number in range(4)]
    sets = {"odd": (prompts[1::2], 1), "all": (prompts, 4)}

    kept: dict[str, list[int]] = {}

    def keep(name: str, groups: Sequence[RolloutGroup]) -> None:
        kept[name] = [group.prompt.prompt_id for group in groups]

    async def run() -> dict[str, float]:
        def sampler(count: int) -> SingleTurns:
            return SingleTurns(echo, ByItself(echo), Sampling(1, samples=count, log_probs=False))

        made = [Evaluator(name, some, sampler(count), count, 0) for name, (some, count) in sets.items()]
        found = await asyncio.gather(*(one.run(keep) for one in made))
        return {name: value for metrics in found for name, value in metrics.items()}

    metrics = asyncio.run(run())
    assert echo.asked == {1: 2, 4: 4}
    assert kept == {"odd": [1, 3], "all": [0, 1, 2, 3]}
    assert metrics["val/odd/pass@1"] == 1 and metrics["val/all/pass@4"] == 0.5 and "val/odd/maj@1" not in metrics


def test_validation_samples_from_seeds_of_its_own() -> None:
    """A prompt with the same number and the same root seed has another seed in training."""

    class Recording:
        def __init__(self) -> None:
            self.seeds: list[int | None] = []

        async def sample(self, prompt: Prompt, seed: int | None) -> RolloutGroup:
            self.seeds.append(seed)
            return make_group(prompt.prompt_id, [make_episode([5])])

        def yields(self, prompt: Prompt, episodes: Sequence[Episode], baseline: Episode | None) -> bool:
            return True

    sampler, prompts = Recording(), [make_prompt(number) for number in range(50)]
    asyncio.run(Evaluator("set", prompts, sampler, 1, 7).run(kept_nowhere))
    of_training = {prompt_seed(7, TRAINING, prompt.prompt_id) for prompt in prompts}
    assert None not in sampler.seeds and len(set(sampler.seeds)) == 50 and not of_training & set(sampler.seeds)
    first = list(sampler.seeds)
    asyncio.run(Evaluator("set", prompts, sampler, 1, 7).run(kept_nowhere))
    assert sampler.seeds == first * 2, "every validation draws the same samples"
    streams = {TRAINING, VALIDATION, episode_groups.TRAINING, episode_groups.HELD_OUT}
    assert len(streams) == 4, "two kinds of draws share a stream of seeds"


def test_the_version_of_a_validation_is_the_oldest() -> None:
    groups = [make_group(0, [make_episode([5, 6], versions=[3, 4])]), make_group(1, [make_episode([5], versions=[5])])]
    assert validation_metrics("set", groups, 1)["val/set/policy_version"] == 3


def test_empty_responses_have_no_vote() -> None:
    """Even if a reward lets an empty response pass."""
    assert majority(["", ""], [True, True]) == 0 and majority(["", "", "a"], [True, True, False]) == 0
    assert validation_metrics("set", [group_of(("", 1.0), ("", 1.0))], 2)["val/set/maj@2"] == 0
