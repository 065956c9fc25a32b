"""The estimators other than grpo and reinforce: by hand, against their formulas, and their invariances."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.advantages import EpisodeTurns, Normalisation, Scores, advantages
from roll.algorithms.moments import Scope
from tests.unit.algorithms.build import ROWS, Row, build, scores

NONE = Normalisation()
CENTRED = ["grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"]
"""Estimators that compare each response with the others to the same prompt."""


def by_response(estimator: str, given_scores: Scores, norm: Normalisation = NONE) -> list[float]:
    """Return the advantage of each response's last token."""
    return advantages(estimator, given_scores, norm)[given_scores.sequences.offsets[1:] - 1].tolist()


FIVE = scores([0, 1, 1, 2, 6], [0, 0, 1, 1, 1], [".x", ".xxx", ".x", ".xx", "..x"])


def test_dr_grpo_subtracts_the_mean_alone() -> None:
    assert by_response("dr_grpo", FIVE) == pytest.approx([-0.5, 0.5, -2, -1, 3])


def test_rloo_leaves_the_response_itself_out() -> None:
    # Means of the other responses: 1, 0; 4, 7/2, 3/2.
    assert by_response("rloo", FIVE) == pytest.approx([-1, 1, -3, -1.5, 4.5])


def test_opo_weighs_the_baseline_by_length() -> None:
    # Group 0: (1 x 0 + 3 x 1) / 4. Group 1: (1 + 4 + 6) / 4.
    assert by_response("opo", FIVE) == pytest.approx([-0.75, 0.25, -1.75, -0.75, 3.25])


def test_opo_weighs_masked_responses_by_their_true_length() -> None:
    masked = replace(scores([0, 4], [0, 0], [".x", "...."]), lengths=np.array([1, 3], np.int32))
    assert by_response("opo", masked)[0] == pytest.approx(-3)


def test_gpg_makes_up_for_groups_that_teach_nothing() -> None:
    # All rewards of group 1 are equal, so 2 of 5 responses count, and each counts 5/2 times.
    assert by_response("gpg", scores([0, 1, 3, 3, 3], [0, 0, 1, 1, 1], [".x"] * 5)) == pytest.approx(
        [-1.25, 1.25, 0, 0, 0]
    )
    assert by_response("gpg", FIVE) == pytest.approx(by_response("dr_grpo", FIVE))


def test_maxrl_divides_by_the_mean() -> None:
    assert by_response("maxrl", FIVE) == pytest.approx([-1, 1, -2 / 3, -1 / 3, 1])
    assert by_response("maxrl", scores([0, 0, -1, 1, -1], [0, 0, 1, 1, 1], [".x"] * 5)) == [0] * 5


@pytest.mark.parametrize("p", [0.03, 0.4, 0.9])
@pytest.mark.parametrize("n", [2, 5, 8])
def test_maxrl_expected_gradient_is_truncated_likelihood_gradient(n: int, p: float) -> None:
    """The expectation is computed exactly, over all outcomes of n samples with success probability p = sigmoid(theta).

    log p = -sum_k (1 - p)^k / k has the derivative sum_k (1 - p)^(k - 1) dp. The expected gradient of the estimator
    consists of the first n - 1 terms of this derivative (theorem 5 of the paper).
    """
    expected = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=n):
        chance = float(np.prod([p if success else 1 - p for success in outcome]))
        credit = by_response("maxrl", scores(list(outcome), [0] * n, [".x"] * n))
        slopes = [1 - p if success else -p for success in outcome]  # derivatives of the samples' log-probabilities
        expected += chance * float(np.dot(credit, slopes)) / n
    terms = sum((1 - p) ** (k - 1) for k in range(1, n))
    assert expected == pytest.approx(terms * p * (1 - p), rel=1e-5)


def test_remax_subtracts_what_the_greedy_response_got() -> None:
    given_scores = scores([1, 0, 3], [0, 0, 1], [".xx", ".x", ".x"], baselines=[0.5, 0.5, 4])
    assert advantages("remax", given_scores, NONE).tolist() == [0, 0.5, 0.5, 0, -0.5, 0, -1]
    # With gamma 1/2, the return of the first response's first token is 1/2, as is its baseline.
    assert advantages("remax", given_scores, Normalisation(gamma=0.5)).tolist() == [0, 0, 0.5, 0, -0.5, 0, -1]
    # The baseline is clipped with the rewards.
    assert by_response("remax", given_scores, Normalisation(reward_clip=2)) == pytest.approx([0.5, -0.5, 0])
    with pytest.raises(AssertionError, match="remax .* greedy responses"):
        advantages("remax", scores([1], [0], [".x"]), NONE)


def with_turns(given_scores: Scores, rewards: list[list[float]], tokens: list[list[int]]) -> Scores:
    """Return the scores with turns. `tokens` has the number of tokens of each turn; the first turn includes the
    prompt.
    """
    counts = [len(row) for row in rewards]
    turns = EpisodeTurns(
        np.array([reward for row in rewards for reward in row], np.float32),
        np.repeat(np.arange(len(rewards), dtype=np.int32), counts),
        np.repeat(np.arange(sum(counts), dtype=np.int32), [count for row in tokens for count in row]),
    )
    return replace(given_scores, turns=turns)


TURNS = with_turns(scores([7, 6, 1], [0, 0, 1], [".xx.xx", ".x", ".x"]), [[3, 4], [6], [1]], [[4, 2], [2], [2]])


def test_step_reinforce_by_hand() -> None:
    assert advantages("step_reinforce", TURNS, NONE).tolist() == [0, 7, 7, 0, 4, 4, 0, 6, 0, 1]
    # The discount applies per turn, not per token.
    assert advantages("step_reinforce", TURNS, Normalisation(gamma=0.5)).tolist() == [0, 5, 5, 0, 4, 4, 0, 6, 0, 1]
    # The returns are 5, 4, 6 and 1. Those of group 0 have mean 5 and variance 1; the mean of all is 4.
    of_group = advantages("step_reinforce", TURNS, Normalisation(gamma=0.5, mean="group", std="group"))
    np.testing.assert_allclose(of_group, [0, 0, 0, 0, -1, -1, 0, 1, 0, 0], atol=2e-6)
    assert advantages("step_reinforce", TURNS, Normalisation(gamma=0.5, mean="batch")).tolist() == [
        0,
        1,
        1,
        0,
        0,
        0,
        0,
        2,
        0,
        -3,
    ]
    # The turns with returns 5, 4 and 1 belong to one domain, and the turn with return 6 to the other. Group 0 has
    # episodes of both.
    halves = replace(TURNS, domains=np.array([0, 1, 0], np.int32))
    of_domain = advantages("step_reinforce", halves, Normalisation(gamma=0.5, mean="domain"))
    np.testing.assert_allclose(of_domain, [0, 5 - 10 / 3, 5 - 10 / 3, 0, 4 - 10 / 3, 4 - 10 / 3, 0, 0, 0, 1 - 10 / 3])
    # Clipping applies to the reward of each turn.
    assert advantages("step_reinforce", TURNS, Normalisation(reward_clip=3.5)).tolist() == [
        0,
        6.5,
        6.5,
        0,
        3.5,
        3.5,
        0,
        3.5,
        0,
        1,
    ]


def test_step_reinforce_sums_penalties_over_a_turn() -> None:
    fined = replace(TURNS, token_penalties=np.array([9, 1, 2, 9, 4, 0, 9, 1, 9, 0], np.float32))
    # Turn 0 pays its own 3 and, discounted, half of turn 1's 4.
    assert advantages("step_reinforce", fined, Normalisation(gamma=0.5)).tolist() == [0, 0, 0, 0, 0, 0, 0, 5, 0, 1]
    # Penalties are subtracted after the normalisation.
    centred = advantages("step_reinforce", fined, Normalisation(gamma=0.5, mean="batch"))
    assert centred.tolist() == [0, -4, -4, 0, -4, -4, 0, 1, 0, -3]


def test_step_reinforce_has_no_running_moments_of_turns() -> None:
    with pytest.raises(AssertionError, match="running moments"):
        advantages("step_reinforce", TURNS, Normalisation(mean="running"))


@given(rows=ROWS, mean=st.sampled_from([None, "batch", "group"]), clip=st.sampled_from([None, 5.0]))
def test_undivided_responses_make_it_reinforce(rows: list[Row], mean: Scope, clip: float | None) -> None:
    norm = Normalisation(mean=mean, std=mean, reward_clip=clip)
    undivided = build(rows)
    np.testing.assert_allclose(
        advantages("step_reinforce", undivided, norm), advantages("reinforce", undivided, norm), rtol=1e-6, atol=1e-6
    )


@given(
    responses=st.lists(
        st.tuples(
            st.integers(0, 2), st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 4)), min_size=1, max_size=4)
        ),
        min_size=1,
        max_size=6,
    ),
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
    by_group=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_step_reinforce_against_its_formula_in_any_order(
    responses: list[tuple[int, list[tuple[int, int]]]], gamma: float, by_group: bool, random: Random
) -> None:
    random.shuffle(responses)
    masks = ["." + "x" * sum(count for _, count in turns) for _, turns in responses]
    plain = scores([0.0] * len(responses), [group for group, _ in responses], masks)
    tokens = [[count + (number == 0) for number, (_, count) in enumerate(turns)] for _, turns in responses]
    given_scores = with_turns(plain, [[float(reward) for reward, _ in turns] for _, turns in responses], tokens)
    returns = [
        [sum(gamma ** (j - k) * turns[j][0] for j in range(k, len(turns))) for k in range(len(turns))]
        for _, turns in responses
    ]
    expected: list[float] = []
    for (group, turns), own in zip(responses, returns, strict=True):
        others = [value for (its, _), row in zip(responses, returns, strict=True) if its == group for value in row]
        mean = sum(others) / len(others) if by_group else 0.0
        expected += [0.0, *(value - mean for value, (_, count) in zip(own, turns, strict=True) for _ in range(count))]
    got = advantages("step_reinforce", given_scores, Normalisation(gamma=gamma, mean="group" if by_group else None))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_reinforce_plus_plus_whitens_over_tokens() -> None:
    # One token has return 1, and three tokens have return 4: mean 13/4, sample variance 9/4.
    low, high = -2.25 / 1.5, 0.75 / 1.5
    got = advantages("reinforce_plus_plus", scores([1, 4], [0, 1], ["..x", ".xxx"]), NONE)
    np.testing.assert_allclose(got, [0, 0, low, 0, high, high, high], rtol=3e-6)


def test_reinforce_plus_plus_penalises_before_whitening() -> None:
    # Immediate rewards -1 and 5 - 1 = 4; returns with gamma 1/2: 1 and 4, with a sample variance of 9/2.
    got = advantages("reinforce_plus_plus", scores([5], [0], [".xx"], [0, 1, 1]), Normalisation(gamma=0.5))
    np.testing.assert_allclose(got, [0, -(0.5**0.5), 0.5**0.5], rtol=1e-5)


def test_reinforce_plus_plus_baseline_whitens_centred_rewards() -> None:
    # Centred: -1/2 on one token and 1/2 on three; mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4.
    got = by_response("reinforce_plus_plus_baseline", scores([0, 1], [0, 0], [".x", ".xxx"]))
    assert got == pytest.approx([-1.5, 0.5], rel=1e-5)


@pytest.mark.parametrize("estimator", ["dr_grpo", "rloo", "opo", "gpg", "remax"])
def test_kl_penalties_count_at_and_before_their_tokens(estimator: str) -> None:
    plain = scores([5, 1], [0, 0], [".xx", ".x"], baselines=[0, 0])
    fined = scores([5, 1], [0, 0], [".xx", ".x"], [9, 1, 2, 9, 4], baselines=[0, 0])
    np.testing.assert_allclose(
        advantages(estimator, plain, NONE) - advantages(estimator, fined, NONE), [0, 3, 2, 0, 4], rtol=1e-6
    )


@pytest.mark.parametrize("estimator", CENTRED)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.3, 1e4])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_groups_of_equal_rewards_teach_nothing(estimator: str, reward: float, size: int) -> None:
    got = advantages(estimator, scores([reward] * size, [0] * size, [".xx"] * size), NONE)
    np.testing.assert_allclose(got, 0, atol=1e-5)


@given(rows=ROWS, shift=st.floats(-50, 50), estimator=st.sampled_from(CENTRED))
def test_a_reward_that_all_responses_get_changes_nothing(rows: list[Row], shift: float, estimator: str) -> None:
    rows = [(round(reward), group, mask) for reward, group, mask in rows]
    moved = [(reward + round(shift), group, mask) for reward, group, mask in rows]
    np.testing.assert_allclose(
        advantages(estimator, build(moved), NONE), advantages(estimator, build(rows), NONE), rtol=1e-4, atol=1e-4
    )


@given(rows=ROWS, estimator=st.sampled_from(["grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]))
def test_doubled_rewards_change_nothing_where_a_deviation_divides(rows: list[Row], estimator: str) -> None:
    rows = [(round(reward), group, mask) for reward, group, mask in rows]
    doubled = [(2 * reward, group, mask) for reward, group, mask in rows]
    np.testing.assert_allclose(
        advantages(estimator, build(doubled), NONE), advantages(estimator, build(rows), NONE), rtol=1e-4, atol=1e-4
    )


@given(rows=ROWS, estimator=st.sampled_from(["dr_grpo", "rloo", "opo", "gpg"]))
def test_doubled_rewards_double_advantages_elsewhere(rows: list[Row], estimator: str) -> None:
    doubled = [(2 * reward, group, mask) for reward, group, mask in rows]
    twice, once = advantages(estimator, build(doubled), NONE), advantages(estimator, build(rows), NONE)
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-5, atol=1e-4)


def formula(estimator: str, rows: list[Row], index: int) -> float:
    """Return the advantage of one response by the paper's formula, in float64."""
    reward, group, _ = rows[index]
    peers = [(float(np.float32(r)), mask.count("x")) for r, g, mask in rows if g == group]
    others = [float(np.float32(r)) for number, (r, g, _) in enumerate(rows) if g == group and number != index]
    mean = sum(r for r, _ in peers) / len(peers)
    match estimator:
        case "dr_grpo":
            return reward - mean
        case "rloo":
            return reward - sum(others) / len(others) if others else 0.0
        case "opo":
            tokens = sum(length for _, length in peers)
            return reward - sum(r * length for r, length in peers) / tokens if tokens else 0.0
        case "gpg":
            alike = [g for g in {g for _, g, _ in rows} if len({np.float32(r) for r, its, _ in rows if its == g}) == 1]
            counted = sum(g not in alike for _, g, _ in rows)
            return (reward - mean) * len(rows) / counted if counted else 0.0
        case _:
            return reward - group


@given(rows=ROWS, estimator=st.sampled_from(["dr_grpo", "rloo", "opo", "gpg", "remax"]))
def test_against_the_formula_in_float64(rows: list[Row], estimator: str) -> None:
    given_scores = build(rows)
    got = advantages(estimator, given_scores, NONE)
    for index in range(len(rows)):
        begin, end = given_scores.sequences.offsets[index : index + 2]
        mask = given_scores.sequences.response_mask[begin:end]
        np.testing.assert_allclose(got[begin:end], mask * formula(estimator, rows, index), rtol=1e-4, atol=1e-3)


@given(rows=ROWS, estimator=st.sampled_from(["reinforce_plus_plus", "reinforce_plus_plus_baseline"]))
def test_whitened_estimators_against_the_formula_in_float64(rows: list[Row], estimator: str) -> None:
    given_scores = build(rows)
    mask = given_scores.sequences.response_mask
    values = [
        row[0] if estimator == "reinforce_plus_plus" else formula("dr_grpo", rows, index)
        for index, row in enumerate(rows)
    ]
    tokens = np.array([value for value, row in zip(values, rows, strict=True) for _ in range(row[2].count("x"))])
    if not len(tokens):
        return
    variance = sum((tokens - tokens.mean()) ** 2) / max(len(tokens) - 1, 1)
    expected = (tokens - tokens.mean()) / (variance + 1e-8) ** 0.5
    np.testing.assert_allclose(advantages(estimator, given_scores, NONE)[mask], expected, rtol=1e-3, atol=1e-3)
