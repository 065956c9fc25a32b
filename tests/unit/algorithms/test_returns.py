"""Discounted returns, GAE and returns of turns: by hand, and against double loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.advantages import discounted, discounted_end, gae, turn_returns
from tests.unit.algorithms.build import responses

MASKS = st.lists(st.text("x.", min_size=1, max_size=7).map(lambda mask: "." + mask), min_size=1, max_size=6)
GAMMAS = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def test_discounted_by_hand() -> None:
    got = discounted(np.array([9.0, 1, 2, 4, 9, 3]), responses(".xxx", ".x"), 0.5)
    assert got.tolist() == [0, 3, 4, 4, 0, 3]


@given(masks=MASKS, gamma=GAMMAS, seed=st.integers(0, 100))
def test_final_reward_is_discounted_to_each_token(masks: list[str], gamma: float, seed: int) -> None:
    sequences = responses(*masks)
    rewards = np.random.default_rng(seed).normal(size=len(sequences)).astype(np.float32)
    got = discounted_end(rewards, sequences, gamma)
    for row, (begin, end) in enumerate(zip(sequences.offsets, sequences.offsets[1:], strict=False)):
        where = begin + np.flatnonzero(sequences.response_mask[begin:end])
        for place, token in enumerate(where):
            assert got[token] == pytest.approx(float(rewards[row]) * gamma ** (len(where) - 1 - place))
    assert not got[~sequences.response_mask].any()


def test_gae_by_hand() -> None:
    # Values 1, 2; rewards 0, 3. TD errors: 0 + 0.5 x 2 - 1 = 0 and 3 - 2 = 1. Advantages: 0 + 0.5 x 0.8 x 1 = 0.4 and
    # 1.
    advantages, returns = gae(np.array([7.0, 0, 3]), np.array([7.0, 1, 2]), responses(".xx"), gamma=0.5, lam=0.8)
    np.testing.assert_allclose(advantages, [0, 0.4, 1])
    np.testing.assert_allclose(returns, [0, 1.4, 3])


def test_gae_does_not_look_into_the_next_sequence() -> None:
    together = gae(np.array([0.0, 1, 0, 2]), np.array([0.0, 5, 0, 7]), responses(".x", ".x"), 1.0, 1.0)[0]
    assert together.tolist() == [0, -4, 0, -5]


@given(masks=MASKS, gamma=GAMMAS, lam=GAMMAS, seed=st.integers(0, 100))
def test_gae_against_its_formula(masks: list[str], gamma: float, lam: float, seed: int) -> None:
    sequences = responses(*masks)
    rewards, values = np.random.default_rng(seed).normal(size=(2, len(sequences.token_ids)))
    advantages, returns = gae(rewards, values, sequences, gamma, lam)
    for begin, end in zip(sequences.offsets, sequences.offsets[1:], strict=False):
        where = begin + np.flatnonzero(sequences.response_mask[begin:end])
        for place, token in enumerate(where):
            expected = 0.0
            for ahead, other in enumerate(where[place:]):
                following = values[where[place + ahead + 1]] if place + ahead + 1 < len(where) else 0.0
                expected += (gamma * lam) ** ahead * (rewards[other] + gamma * following - values[other])
            assert advantages[token] == pytest.approx(expected)
            assert returns[token] == pytest.approx(expected + values[token])
    assert not advantages[~sequences.response_mask].any()
    assert not returns[~sequences.response_mask].any()


@given(masks=MASKS, gamma=GAMMAS, seed=st.integers(0, 100))
def test_gae_without_critic_at_lambda_1_is_return(masks: list[str], gamma: float, seed: int) -> None:
    sequences = responses(*masks)
    rewards = np.random.default_rng(seed).normal(size=len(sequences.token_ids))
    advantages, _ = gae(rewards, np.zeros_like(rewards), sequences, gamma, 1.0)
    np.testing.assert_allclose(advantages, discounted(rewards, sequences, gamma))


def test_turns_by_hand() -> None:
    # The first response has turns with rewards 3 and 4, the second one turn with reward 6. The discount applies per
    # turn.
    rewards, rows = np.array([3.0, 4, 6]), np.array([0, 0, 1], np.int32)
    assert turn_returns(rewards, rows, 0.5).tolist() == [5, 4, 6]
    assert turn_returns(rewards, rows, 0.0).tolist() == [3, 4, 6]
    assert turn_returns(rewards, rows, 1.0).tolist() == [7, 4, 6]


@given(counts=st.lists(st.integers(0, 5), max_size=6), gamma=GAMMAS, seed=st.integers(0, 100))
def test_turns_against_their_formula(counts: list[int], gamma: float, seed: int) -> None:
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    rewards = np.random.default_rng(seed).normal(size=len(rows))
    got = turn_returns(rewards, rows, gamma)
    for index, row in enumerate(rows):
        after = [other for other in range(index, len(rows)) if rows[other] == row]
        assert got[index] == pytest.approx(sum(gamma ** (other - index) * rewards[other] for other in after))
