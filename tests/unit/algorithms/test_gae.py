"""`adv_estimator: gae`: advantages and the critic's value targets, from rewards, penalties and values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.advantages import Normalisation, Scores, advantages, value_targets
from roll.rollout.batch import value_metrics
from tests.unit.algorithms.build import ROWS, Row, build, scores

FACTORS = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def with_values(given_scores: Scores, values: list[float]) -> Scores:
    return replace(given_scores, values=np.array(values, np.float32))


def random_values(given_scores: Scores, seed: int) -> Scores:
    """Return the scores with random values and penalties at every token."""
    values, penalties = (
        np.random.default_rng(seed).normal(size=(2, len(given_scores.sequences.token_ids))).astype(np.float32)
    )
    return replace(given_scores, values=values, token_penalties=penalties)


def test_by_hand() -> None:
    # Reward 3, penalties 1 and 0.5, values 2 and 1. TD errors: -1 + 0.5 x 1 - 2 = -2.5 and 2.5 - 1 = 1.5.
    # Advantages: -2.5 + 0.4 x 1.5 = -1.9 and 1.5.
    one = with_values(scores([3], [0], [".xx"], [9, 1, 0.5]), [9, 2, 1])
    norm = Normalisation(gamma=0.5, lambd=0.8)
    np.testing.assert_allclose(advantages("gae", one, norm), [0, -1.9, 1.5], rtol=1e-6)
    np.testing.assert_allclose(value_targets(one, norm), [0, 0.1, 2.5], rtol=1e-5)


def test_value_targets_use_clipped_rewards_without_whitened_advantages() -> None:
    two = with_values(scores([9, 1], [0, 1], [".x", ".xx"]), [0, 1, 0, 0.5, 0.5])
    plain = value_targets(two, Normalisation(reward_clip=2.0))
    np.testing.assert_allclose(plain, [0, 2, 0, 0.975, 1], rtol=1e-6)
    norm = Normalisation(reward_clip=2.0, whiten=True, advantage_clip=0.1)
    np.testing.assert_array_equal(value_targets(two, norm), plain)
    assert np.abs(advantages("gae", two, norm)).max() == pytest.approx(0.1)


def test_without_values_it_is_refused() -> None:
    with pytest.raises(AssertionError, match="gae .* critic"):
        advantages("gae", scores([1], [0], [".x"]), Normalisation())


def by_definition(given_scores: Scores, index: int, gamma: float, lam: float) -> list[float]:
    """Return the advantages of one response: each is a discounted sum of the TD errors from its token on, in
    float64.
    """
    assert given_scores.values is not None and given_scores.token_penalties is not None
    begin, end = given_scores.sequences.offsets[index : index + 2]
    where = [token for token in range(begin, end) if given_scores.sequences.response_mask[token]]
    rewards = [-float(given_scores.token_penalties[token]) for token in where]
    if where:
        rewards[-1] += float(given_scores.rewards[index])
    values = [float(given_scores.values[token]) for token in where] + [0.0]
    out = []
    for t in range(len(where)):
        errors = [rewards[u] + gamma * values[u + 1] - values[u] for u in range(t, len(where))]
        out.append(sum((gamma * lam) ** distance * error for distance, error in enumerate(errors)))
    return out


@given(rows=ROWS, gamma=FACTORS, lam=FACTORS, seed=st.integers(0, 100))
def test_against_its_definition(rows: list[Row], gamma: float, lam: float, seed: int) -> None:
    given_scores, norm = random_values(build(rows), seed), Normalisation(gamma=gamma, lambd=lam)
    got, targets = advantages("gae", given_scores, norm), value_targets(given_scores, norm)
    assert given_scores.values is not None
    for index in range(len(rows)):
        begin, end = given_scores.sequences.offsets[index : index + 2]
        where = begin + np.flatnonzero(given_scores.sequences.response_mask[begin:end])
        expected = by_definition(given_scores, index, gamma, lam)
        np.testing.assert_allclose(got[where], expected, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(targets[where], expected + given_scores.values[where], rtol=1e-4, atol=1e-3)
    outside = ~given_scores.sequences.response_mask
    assert not got[outside].any() and not targets[outside].any()


@given(rows=ROWS, seed=st.integers(0, 100))
def test_gae_with_lambda_1_is_return_minus_value(rows: list[Row], seed: int) -> None:
    given_scores, norm = random_values(build(rows), seed), Normalisation(lambd=1.0)
    returns = advantages("reinforce", given_scores, norm)
    assert given_scores.values is not None
    baseline = np.where(given_scores.sequences.response_mask, given_scores.values, 0)
    np.testing.assert_allclose(advantages("gae", given_scores, norm), returns - baseline, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(value_targets(given_scores, norm), returns, rtol=1e-4, atol=1e-3)


@given(rows=ROWS, gamma=FACTORS, lam=FACTORS)
def test_exact_critic_leaves_zero_advantages(rows: list[Row], gamma: float, lam: float) -> None:
    given_scores = build(rows)
    exact = advantages("reinforce", given_scores, Normalisation(gamma=gamma))
    knowing, norm = replace(given_scores, values=exact), Normalisation(gamma=gamma, lambd=lam)
    np.testing.assert_allclose(advantages("gae", knowing, norm), 0, atol=1e-3)
    np.testing.assert_allclose(value_targets(knowing, norm), exact, atol=1e-3)


def test_what_values_are_worth_by_hand() -> None:
    values, returns = np.array([0, 1, 1, 2], np.float32), np.array([0, 2, 2, 4], np.float32)
    # Var(returns) = 2, Var(returns - values) = 1/2.
    expected = {"critic/value_mean": 1.0, "critic/return_mean": 2.0, "critic/explained_variance": 0.75}
    assert value_metrics(values, returns) == pytest.approx(expected)
    assert value_metrics(returns + 3, returns)["critic/explained_variance"] == pytest.approx(1)
    assert value_metrics(np.full(4, 9, np.float32), returns)["critic/explained_variance"] == pytest.approx(0)
    assert "critic/explained_variance" not in value_metrics(values, np.ones(4, np.float32))
    assert value_metrics(values[:0], returns[:0]) == {}
