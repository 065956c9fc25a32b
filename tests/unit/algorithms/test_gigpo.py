"""Group-in-group policy optimisation (GiGPO): by hand, and against its formula turn by turn."""

from __future__ import annotations

from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.advantages import EpisodeTurns, Normalisation, Scores, advantages
from tests.unit.algorithms.build import scores

Played = tuple[int, list[tuple[float, str]]]
"""An episode: its group, and the reward of each turn with the state in which the turn was taken."""


def played(episodes: list[Played]) -> Scores:
    """Return scores of these episodes. Each turn is one token of the environment and two sampled tokens."""
    turns = [turn for _, each in episodes for turn in each]
    rows = np.repeat(np.arange(len(episodes), dtype=np.int32), [len(each) for _, each in episodes])
    names = sorted({state for _, state in turns})
    of_token = np.repeat(np.arange(len(turns), dtype=np.int32), 3)
    divided = EpisodeTurns(
        np.array([earned for earned, _ in turns], np.float32),
        rows,
        of_token,
        np.array([names.index(state) for _, state in turns]),
    )
    rewards = [sum(earned for earned, _ in each) for _, each in episodes]
    made = scores(rewards, [group for group, _ in episodes], [".xx" * len(each) for _, each in episodes])
    return Scores(made.sequences, made.rewards, made.groups, turns=divided)


def by_turn(given_scores: Scores, **own: float) -> list[float]:
    """Return the advantage of each turn, after checking that its two sampled tokens share it and that the environment's
    token has 0.
    """
    found = advantages("gigpo", given_scores, Normalisation(), own).reshape(-1, 3)
    assert not found[:, 0].any()
    assert (found[:, 1] == found[:, 2]).all()
    return found[:, 1].tolist()


TWO = played([(0, [(0, "start"), (1, "left")]), (0, [(0, "start"), (0, "right")])])


def test_by_hand() -> None:
    """The rewards 1 and 0 have mean 1/2. From the shared first state, the returns with gamma 1/2 are 1/2 and 0."""
    assert by_turn(TWO, step_reward_gamma=0.5, gigpo_std=False) == [0.75, 0.5, -0.75, -0.5]
    assert by_turn(TWO, step_reward_gamma=0.5, gigpo_std=False, step_reward_weight=2.0) == [1.0, 0.5, -1.0, -0.5]
    assert by_turn(TWO, step_reward_gamma=0.5, gigpo_std=False, episode_reward_weight=0.0) == [0.25, 0, -0.25, 0]
    # The sample standard deviations (n - 1) of (1, 0) and of (1/2, 0) are sqrt(1/2) and sqrt(1/8).
    whole = 2**-0.5
    assert by_turn(TWO, step_reward_gamma=0.5) == pytest.approx([2 * whole, whole, -2 * whole, -whole], rel=1e-5)


def test_gigpo_compares_states_that_recur_in_one_episode() -> None:
    """The first episode visits state 'a' twice, and the return from its second visit is higher."""
    circle = played([(0, [(-1, "a"), (2, "a")]), (0, [(1, "b")])])
    # Both episodes earn 1. The returns from 'a' are 1 and 2.
    assert by_turn(circle, step_reward_gamma=1.0, gigpo_std=False) == [-0.5, 0.5, 0]


def test_equal_states_of_other_groups_are_others() -> None:
    apart = played([(0, [(1, "a")]), (1, [(0, "a")])])
    assert by_turn(apart) == [0, 0]


def test_without_states_it_is_grpo() -> None:
    plain = scores([0, 1, 1, 2, 6], [0, 0, 1, 1, 1], [".x", ".xxx", ".x", ".xx", "..x"])
    assert advantages("gigpo", plain, Normalisation()).tolist() == advantages("grpo", plain, Normalisation()).tolist()


TURN = st.tuples(st.integers(-4, 4).map(float), st.sampled_from("abc"))
EPISODES = st.lists(st.tuples(st.integers(0, 1), st.lists(TURN, min_size=1, max_size=4)), min_size=1, max_size=6)


@given(
    episodes=EPISODES,
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
    weights=st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.5, 2.0])),
    divide=st.booleans(),
)
def test_against_the_formula(episodes: list[Played], gamma: float, weights: tuple[float, float], divide: bool) -> None:
    def compared(value: float, others: list[float]) -> float:
        spread = stdev(others) if divide and len(others) > 1 else 0.0
        return (value - fmean(others)) / (spread + 1e-6 if spread > 1e-6 else 1.0)

    returns = [
        [sum(gamma**ahead * earned for ahead, (earned, _) in enumerate(turns[k:])) for k in range(len(turns))]
        for _, turns in episodes
    ]
    expected = []
    for number, (group, turns) in enumerate(episodes):
        rewards = [sum(earned for earned, _ in others) for which, others in episodes if which == group]
        for k, (_, state) in enumerate(turns):
            same = [
                returns[i][j]
                for i, (which, others) in enumerate(episodes)
                for j, (_, seen) in enumerate(others)
                if which == group and seen == state
            ]
            whole = compared(sum(earned for earned, _ in turns), rewards)
            expected.append(weights[0] * whole + weights[1] * compared(returns[number][k], same))
    found = by_turn(
        played(episodes),
        step_reward_gamma=gamma,
        episode_reward_weight=weights[0],
        step_reward_weight=weights[1],
        gigpo_std=divide,
    )
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
