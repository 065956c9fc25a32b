"""The advantages of pass@k, against all subsets of samples; and their expected gradient, against the objective's own
gradient.
"""

from __future__ import annotations

import itertools
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.advantages import Normalisation, Scores, added_to_best, advantages
from tests.unit.algorithms.build import scores

SIZES = [(2, 2), (5, 2), (5, 4), (6, 3), (4, 4)]
"""Pairs of the group size n and of k."""


def by_subsets(rewards: list[float], k: int) -> list[float]:
    """Return the credit of each sample: k times its mean gain over all subsets of k samples that contain it.

    The gain is the largest reward in the subset minus the largest reward of the other samples in it.
    """
    out = []
    for index, reward in enumerate(rewards):
        others = [other for number, other in enumerate(rewards) if number != index]
        gains = [max(reward, *rest) - max(rest) for rest in itertools.combinations(others, k - 1)]
        out.append(k * sum(gains) / len(gains))
    return out


def credited(given_scores: Scores, k: int) -> list[float]:
    """Return the advantage of each response. Every sequence is one prompt token and one response token."""
    return advantages("pass_at_k", given_scores, Normalisation(), {"pass_k": k})[1::2].tolist()


@given(rewards=st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=9), k=st.integers(2, 9))
def test_against_every_choice_of_samples(rewards: list[float], k: int) -> None:
    k = min(k, len(rewards))
    assert k * added_to_best(np.array(rewards, np.float32), k) == pytest.approx(
        by_subsets(rewards, k), rel=1e-9, abs=1e-9
    )


@pytest.mark.parametrize("p", [0.03, 0.4, 0.9])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_pass_at_k_has_its_expected_gradient(n: int, k: int, p: float) -> None:
    """Exact, over all outcomes of n samples with success probability p = sigmoid(theta).

    The derivative of 1 - (1 - p)^k with respect to theta is k (1 - p)^(k - 1) p (1 - p).
    """
    expected = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=n):
        chance = float(np.prod([p if success else 1 - p for success in outcome]))
        slopes = [1 - p if success else -p for success in outcome]  # derivatives of the samples' log-probabilities
        expected += chance * float(np.dot(credited(scores(list(outcome), [0] * n, [".x"] * n), k), slopes)) / n
    assert expected == pytest.approx(k * (1 - p) ** (k - 1) * p * (1 - p), rel=1e-5)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_pass_at_k_gradient_is_that_of_maximum(n: int, k: int) -> None:
    """Exact, over all draws of n samples from four rewards under a softmax of three logits and 0, against finite
    differences in float64.
    """
    values, theta = np.array([-2.0, 0.5, 0.5, 3.0]), np.array([0.3, -0.5, 0.8])

    def chances(logits: np.ndarray) -> np.ndarray:
        weights = np.exp(np.append(logits, 0.0))
        return weights / weights.sum()

    def objective(logits: np.ndarray) -> float:
        chance = chances(logits)
        return sum(
            float(np.prod(chance[list(drawn)])) * float(values[list(drawn)].max())
            for drawn in itertools.product(range(4), repeat=k)
        )

    chance, gradient = chances(theta), np.zeros(3)
    for drawn in itertools.product(range(4), repeat=n):
        credit = k * added_to_best(values[list(drawn)], k)
        slopes = np.eye(4)[list(drawn)][:, :3] - chance[:3]
        gradient += float(np.prod(chance[list(drawn)])) * (credit @ slopes) / n
    step = 1e-5
    numeric = [(objective(theta + step * unit) - objective(theta - step * unit)) / (2 * step) for unit in np.eye(3)]
    assert gradient == pytest.approx(np.array(numeric), rel=1e-8, abs=1e-10)


def test_correct_response_earns_more_if_others_fail() -> None:
    """Two of five are right. k = 3: both other samples are wrong in 3 of 6 choices. A group of two uses k = 2; a group
    of one gets 0.
    """
    given_scores = scores([1, 0, 0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 1, 1, 2], [".x"] * 8)
    assert credited(given_scores, 3) == pytest.approx([1.5, 0, 0, 1.5, 0, 2, 0, 0])


@pytest.mark.parametrize("reward", [-1e6, 0.1, 1 / 3])
def test_equal_rewards_add_nothing_in_large_groups(reward: float) -> None:
    assert not added_to_best(np.full(2000, reward, np.float32), 700).any()
    one = np.zeros(2000, np.float32)
    one[7] = 1
    assert added_to_best(one, 700)[7] == pytest.approx(1.0)
    two = one.copy()
    two[9] = 1
    assert added_to_best(two, 700)[9] == pytest.approx(comb(1998, 699) / comb(1999, 699), rel=1e-9)
