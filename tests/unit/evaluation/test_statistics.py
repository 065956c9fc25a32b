"""Estimates and confidence intervals, compared with enumerations and published values in float64."""

from __future__ import annotations

import random
from itertools import combinations, product
from math import comb, sqrt
from statistics import fmean

import pytest

from roll.evaluation.results import CONFIDENCE, average, set_result, share_estimate, standard_error, wilson
from roll.runs.rlvr.validation import estimate_pass_at_k
from roll.types import RolloutGroup
from tests.unit.rollout.build import make_episode, make_group


@pytest.mark.parametrize(
    ("right", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_is_the_published_interval(right: int, trials: int, low: float, high: float) -> None:
    """Newcombe, 1998, "Two-sided confidence intervals for the single proportion", table I, method 3."""
    assert wilson(right / trials, trials) == pytest.approx((low, high), abs=5e-5)
    one_sample = share_estimate([1.0] * right + [0.0] * (trials - right), 1)
    assert (one_sample.low, one_sample.high) == pytest.approx((low, high), abs=5e-5)


def test_standard_error_is_that_of_all_resamples() -> None:
    values = [0.0, 0.25, 0.25, 1.0]
    means = [fmean(drawn) for drawn in product(values, repeat=len(values))]
    middle = fmean(means)
    assert standard_error(values) == pytest.approx(sqrt(fmean((mean - middle) ** 2 for mean in means)), rel=1e-12)


def test_repeated_samples_do_not_narrow_intervals() -> None:
    """If all responses to a prompt agree, eight of them contain no more information than one."""
    once, eight = share_estimate([1.0, 0.0, 0.0, 1.0, 0.0], 1), share_estimate([1.0, 0.0, 0.0, 1.0, 0.0], 8)
    assert (once.low, once.high) == (eight.low, eight.high)


def test_prompts_that_are_all_alike_count_each_sample() -> None:
    assert (share_estimate([0.5] * 10, 4).low, share_estimate([0.5] * 10, 4).high) == pytest.approx(wilson(0.5, 40))


def test_an_effective_size_lies_between_prompts_and_responses() -> None:
    """Shares that hardly differ by chance are no more observations than there are responses, and clusters no fewer than
    prompts.
    """
    alike = [0.5, 0.5, 0.5, 0.25]  # mean 7/16; p (1 - p) / SE^2 = 84, and there are 16 responses
    assert (share_estimate(alike, 4).low, share_estimate(alike, 4).high) == pytest.approx(wilson(7 / 16, 16))
    apart = [
        0.0,
        0.0,
        1.0,
        1.0,
        1.0,
    ]  # the largest variance of shares with mean 3/5: p (1 - p) / SE^2 is the number of prompts
    assert (share_estimate(apart, 4).low, share_estimate(apart, 4).high) == pytest.approx(wilson(0.6, 5))
    between = [0.0, 0.25, 0.75, 1.0]  # variance 5/32: (1/4) / (5/32 / 4) = 6.4
    assert (share_estimate(between, 4).low, share_estimate(between, 4).high) == pytest.approx(wilson(0.5, 6.4))


@pytest.mark.parametrize(("value", "bound"), [(0.0, "low"), (1.0, "high")])
def test_an_interval_ends_at_0_and_1(value: float, bound: str) -> None:
    found = share_estimate([value] * 5, 3)
    assert getattr(found, bound) == value and 0.3 < found.high - found.low < 0.6


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5, 0.9])
def test_the_interval_covers_what_it_claims(probability: float) -> None:
    """The coverage is the total probability of the outcomes whose interval contains the true value, for 60 prompts with
    one sample each.

    The coverage of Wilson's interval oscillates about the nominal coverage.
    """
    prompts, covered = 60, 0.0
    for right in range(prompts + 1):
        found = share_estimate([1.0] * right + [0.0] * (prompts - right), 1)
        if found.low <= probability <= found.high:
            covered += comb(prompts, right) * probability**right * (1 - probability) ** (prompts - right)
    assert covered == pytest.approx(CONFIDENCE, abs=0.03)


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("levels", [(0.0, 1.0), (0.0, 1 / 3, 2 / 3, 1.0), (0.9, 1.0), (0.0, 1e-9)])
def test_intervals_of_rewards_stay_within_bounds(samples: int, levels: tuple[float, ...]) -> None:
    draw = random.Random(samples)
    for prompts in (1, 2, 3, 10, 100):
        for likely in (0.0, 0.05, 0.5, 0.95, 1.0):
            groups = [
                group(*(levels[-1] if draw.random() < likely else draw.choice(levels) for _ in range(samples)))
                for _ in range(prompts)
            ]
            for name, found in set_result("heldout", groups, samples).estimates.items():
                assert 0 <= found.low <= found.value <= found.high <= 1, (name, prompts, likely)


def test_the_average_of_shares_covers_its_probability() -> None:
    """Graded rewards of two independent tests: the interval of the mean covers the true mean about as often as it
    says.
    """
    draw, trials, covered = random.Random(0), 1000, 0
    for _ in range(trials):
        groups = [group(*((draw.random() < 0.9) / 2 + (draw.random() < 0.9) / 2 for _ in range(2))) for _ in range(30)]
        found = set_result("heldout", groups, 2).estimates["avg@2"]
        covered += found.low <= 0.9 <= found.high
    assert 0.93 <= covered / trials <= 1.0


def test_average_interval_follows_from_its_standard_error() -> None:
    found = average([-1.0, 2.0, 5.0, 0.0])
    assert found.value == 1.5 and found.high - found.value == pytest.approx(found.value - found.low)
    assert found.high - found.value == pytest.approx(1.959963984540054 * sqrt(21.0) / 4)


@pytest.mark.parametrize("samples", [1, 3, 6])
def test_pass_at_k_is_share_of_passing_choices(samples: int) -> None:
    for right, k in product(range(samples + 1), range(1, samples + 1)):
        outcomes = [True] * right + [False] * (samples - right)
        choices = [any(chosen) for chosen in combinations(outcomes, k)]
        assert estimate_pass_at_k(samples, right, k) == pytest.approx(fmean(choices), abs=1e-15)


def group(*rewards: float) -> RolloutGroup:
    return make_group(0, [make_episode([5], reward) for reward in rewards])


def test_evaluation_estimates_equal_those_of_validation() -> None:
    found = set_result("heldout", [group(1.0, 0.0, 0.0, 0.0), group(1.0, 1.0, 0.0, 1.0), group(0.0, 0.0, 0.0, -1.0)], 4)
    assert (found.prompts, found.samples) == (3, 4) and list(found.estimates) == [
        "accuracy",
        "pass@2",
        "pass@4",
        "avg@4",
    ]
    assert found.estimates["accuracy"].value == pytest.approx(4 / 12) and found.estimates[
        "avg@4"
    ].value == pytest.approx(3 / 12)
    assert found.estimates["accuracy"].value == found.metrics["val/heldout/pass@1"]
    for name in ("pass@2", "pass@4", "avg@4"):
        assert found.estimates[name].value == pytest.approx(found.metrics[f"val/heldout/{name}"])
        assert found.estimates[name].low < found.estimates[name].value < found.estimates[name].high
