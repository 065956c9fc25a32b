"""Advantage estimators: `grpo` and `reinforce` by hand, and properties that all estimators share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.advantages import ADVANTAGES, Normalisation, advantages
from roll.algorithms.moments import RunningMoments, Scope
from roll.data.packing import select, token_positions
from tests.unit.algorithms.build import ROWS, Row, build, scores


def test_grpo_of_two_groups_by_hand() -> None:
    # Group 0: mean 1/2, sample std sqrt(1/2). Group 1: mean 2, std 1.
    got = advantages(
        "grpo", scores([0, 1, 1, 2, 3], [0, 0, 1, 1, 1], [".x", ".xx", ".x", ".x", "..x"]), Normalisation()
    )
    half = 0.5 / (0.5**0.5 + 1e-6)
    np.testing.assert_allclose(got, [0, -half, 0, half, half, 0, -1, 0, 0, 0, 0, 1], rtol=2e-6, atol=1e-6)
    assert got.dtype == np.float32


def test_grpo_ignores_the_settings_of_reinforce() -> None:
    given_scores = scores([0, 1, 4], [0, 0, 0], [".xx", ".xx", ".x"])
    plain = advantages("grpo", given_scores, Normalisation())
    np.testing.assert_array_equal(
        advantages("grpo", given_scores, Normalisation(mean="batch", std="batch", gamma=0.5)), plain
    )


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.3, 1e4])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_group_of_equal_rewards_teaches_nothing(reward: float, size: int) -> None:
    got = advantages("grpo", scores([reward] * size, [0] * size, [".xx"] * size), Normalisation())
    np.testing.assert_allclose(got, 0, atol=1e-5)


def test_reinforce_is_the_reward_itself_unless_told() -> None:
    got = advantages("reinforce", scores([3, -2], [0, 0], [".xxx", ".x"]), Normalisation())
    np.testing.assert_array_equal(got, [0, 3, 3, 3, 0, -2])


def test_reinforce_discounts_from_the_last_token_back() -> None:
    got = advantages("reinforce", scores([8], [0], ["..xxxx"]), Normalisation(gamma=0.5))
    np.testing.assert_array_equal(got, [0, 0, 1, 2, 4, 8])


def test_gamma_zero_pays_the_last_token_alone() -> None:
    got = advantages("reinforce", scores([8], [0], [".xxx"]), Normalisation(gamma=0.0))
    np.testing.assert_array_equal(got, [0, 0, 0, 8])


def test_kl_penalties_count_at_and_before_their_tokens() -> None:
    # Immediate rewards: -1, -2 and 5 - 4 = 1. Returns from the last token back: 1, -1, -2. The prompt's penalty of 9
    # does not count.
    given_scores = scores([5], [0], [".xxx"], [9, 1, 2, 4])
    np.testing.assert_array_equal(advantages("reinforce", given_scores, Normalisation()), [0, -2, -1, 1])
    # With gamma 1/2, from the last token back: 1, -2 + 1/2, -1 + (-3/2)/2.
    np.testing.assert_array_equal(advantages("reinforce", given_scores, Normalisation(gamma=0.5)), [0, -1.75, -1.5, 1])


def test_kl_penalties_skip_gaps_of_the_mask() -> None:
    got = advantages("reinforce", scores([1], [0], [".x.x"], [0, 0.25, 100, 0.5]), Normalisation())
    np.testing.assert_array_equal(got, [0, 0.25, 0, 0.5])


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        ("batch", None, [-2.5, -1.5, 0.5, 3.5]),
        ("group", None, [-0.5, 0.5, -1.5, 1.5]),
        # Group stds: sqrt(1/2), sqrt(9/2). Batch: mean 5/2, squares 6.25 + 2.25 + 0.25 + 12.25 = 21, std sqrt(7).
        ("group", "group", [-0.5 / 0.5**0.5, 0.5 / 0.5**0.5, -1.5 / 4.5**0.5, 1.5 / 4.5**0.5]),
        ("batch", "batch", [-2.5 / 7**0.5, -1.5 / 7**0.5, 0.5 / 7**0.5, 3.5 / 7**0.5]),
        ("group", "batch", [-0.5 / 7**0.5, 0.5 / 7**0.5, -1.5 / 7**0.5, 1.5 / 7**0.5]),
        (None, "batch", [0, 1 / 7**0.5, 3 / 7**0.5, 6 / 7**0.5]),
    ],
)
def test_reinforce_normalises_over_what_it_is_told(mean: Scope, std: Scope, expected: list[float]) -> None:
    got = advantages("reinforce", scores([0, 1, 3, 6], [0, 0, 1, 1], [".x"] * 4), Normalisation(mean=mean, std=std))
    np.testing.assert_allclose(got[1::2], expected, rtol=3e-6)
    np.testing.assert_array_equal(got[::2], 0)


@pytest.mark.parametrize(("mean", "expected"), [(None, 1.0), ("batch", 0.5)])
def test_rewards_that_do_not_spread_are_not_divided(mean: Scope, expected: float) -> None:
    """Equal rewards have a standard deviation of 0. If they were divided by the epsilon of 1e-6, they would become
    millions.
    """
    got = advantages("reinforce", scores([1, 1, 0, 0], [0, 0, 1, 1], [".x"] * 4), Normalisation(mean=mean, std="group"))
    np.testing.assert_allclose(got[1::2], [expected, expected, expected - 1, expected - 1], rtol=1e-6)
    first_step = advantages(
        "reinforce", replace(scores([3], [0], [".x"]), running=RunningMoments(1, 3.0)), Normalisation(std="running")
    )
    np.testing.assert_allclose(first_step, [0, 3])


def test_grpo_around_the_smallest_standard_deviation() -> None:
    """The standard deviation of two rewards is their difference divided by sqrt(2): 0.997e-6 counts as 0, 1.004e-6 does
    not.
    """
    below, above = (
        advantages("grpo", scores([0, high], [0, 0], [".x"] * 2), Normalisation())[3] for high in (1.41e-6, 1.42e-6)
    )
    assert below == pytest.approx(0.705e-6)
    assert above == pytest.approx(0.71 / 2.00409, rel=1e-5)


def test_rewards_are_clipped_before_and_advantages_after() -> None:
    clipped_rewards = advantages("reinforce", scores([9, -9, 1], [0, 0, 0], [".x"] * 3), Normalisation(reward_clip=2))
    np.testing.assert_array_equal(clipped_rewards[1::2], [2, -2, 1])
    # Clipping to [-2, 2] first makes the two rewards equal, so their advantages are 0.
    np.testing.assert_allclose(
        advantages("grpo", scores([9, 5], [0, 0], [".x"] * 2), Normalisation(reward_clip=2)), 0, atol=1e-6
    )
    clipped = advantages(
        "reinforce", scores([9, -9, 1], [0, 0, 0], [".x"] * 3), Normalisation(mean="batch", advantage_clip=2)
    )
    np.testing.assert_allclose(clipped[1::2], [2, -2, 1 - 1 / 3], rtol=1e-6)


def test_whitening_counts_response_tokens_only() -> None:
    # The tokens have 1 once and 4 three times: mean 13/4, sample variance (2.25^2 + 3 * 0.75^2) / 3 = 9/4.
    got = advantages("reinforce", scores([1, 4], [0, 1], ["..x", ".xxx"]), Normalisation(whiten=True))
    low, high = -2.25 / 1.5, 0.75 / 1.5
    np.testing.assert_allclose(got, [0, 0, low, 0, high, high, high], rtol=3e-6)


def test_whitening_by_domain_takes_each_domains_tokens() -> None:
    # Domain 0 has the tokens 1, 4, 4, 4, as above; domain 1 has 10 and 20: mean 15, sample variance 50.
    mixed = replace(
        scores([1, 10, 4, 20], [0, 1, 2, 3], ["..x", ".x", ".xxx", "x"]), domains=np.array([0, 1, 0, 1], np.int32)
    )
    got = advantages("reinforce", mixed, Normalisation(whiten="domain"))
    half = 0.5**0.5
    np.testing.assert_allclose(got, [0, 0, -1.5, 0, -half, 0, 0.5, 0.5, 0.5, half], rtol=1e-7, atol=1e-7)


def test_single_token_of_a_domain_whitens_to_zero() -> None:
    lone = replace(scores([3, 1, 2], [0, 1, 2], [".x", ".x", ".x"]), domains=np.array([0, 1, 1], np.int32))
    half = 0.5**0.5
    np.testing.assert_allclose(
        advantages("reinforce", lone, Normalisation(whiten="domain")), [0, 0, 0, -half, 0, half], atol=1e-6
    )


def test_normalised_reward_clip_bounds_rewards_with_penalties() -> None:
    # Rewards 0, 0, 0, 4: mean 1, sample standard deviation 2, so -1/2 three times and 3/2, which is clipped to 1.
    late = Normalisation(reward_clip=1, clips_normalised=True)
    np.testing.assert_allclose(
        advantages("grpo", scores([0, 0, 0, 4], [0] * 4, [".x"] * 4), late)[1::2], [-0.5] * 3 + [1], rtol=1e-6
    )
    # Token rewards -3 and 5 - 1 are first 0 - 3 and 1 - 1, and then clipped to -1 and 0.
    fined = scores([5], [0], [".xx"], [0, 3, 1])
    assert advantages("reinforce", fined, late).tolist() == [0, -1, 0]
    assert advantages("reinforce", fined, Normalisation(reward_clip=1)).tolist() == [0, -3, 0]


def test_whitening_nothing_is_nothing() -> None:
    np.testing.assert_array_equal(
        advantages("reinforce", scores([1, 4], [0, 0], ["..", "..."]), Normalisation(whiten=True)), 0
    )


def test_masked_response_counts_in_its_groups_statistics() -> None:
    got = advantages("grpo", scores([0, 1, 2], [0, 0, 0], [".x", "...", ".x"]), Normalisation())
    np.testing.assert_allclose(got, [0, -1, 0, 0, 0, 0, 1], atol=2e-6)


def test_unknown_advantage_estimator_names_known_ones() -> None:
    with pytest.raises(KeyError, match=r"'grpp' .*'grpo'\?\); known: dr_grpo, gae, gigpo, "):
        advantages("grpp", scores([1], [0], [".x"]), Normalisation())


NORMALISATIONS = st.builds(
    Normalisation,
    mean=st.sampled_from([None, "batch", "group"]),
    std=st.sampled_from([None, "batch", "group"]),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    whiten=st.booleans(),
    reward_clip=st.none() | st.just(5.0),
    advantage_clip=st.none() | st.just(1.5),
)


@given(rows=ROWS, norm=NORMALISATIONS, estimator=st.sampled_from(sorted(ADVANTAGES)))
def test_nothing_outside_the_mask_or_beyond_the_clip(rows: list[Row], norm: Normalisation, estimator: str) -> None:
    given_scores = build(rows)
    got = advantages(estimator, given_scores, norm)
    assert np.isfinite(got).all()
    assert not got[~given_scores.sequences.response_mask].any()
    if norm.advantage_clip is not None:
        assert np.abs(got).max() <= norm.advantage_clip


@given(
    rows=ROWS,
    norm=NORMALISATIONS,
    estimator=st.sampled_from(sorted(ADVANTAGES)),
    random=st.randoms(use_true_random=False),
)
def test_the_order_of_responses_does_not_matter(
    rows: list[Row], norm: Normalisation, estimator: str, random: np.random.RandomState
) -> None:
    given_scores = build(rows)
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = build([rows[index] for index in order])
    assert shuffled.sequences.token_ids.tolist() == select(given_scores.sequences, order).token_ids.tolist()
    expected = advantages(estimator, given_scores, norm)[token_positions(given_scores.sequences.offsets, order)]
    np.testing.assert_allclose(advantages(estimator, shuffled, norm), expected, rtol=1e-4, atol=1e-3)


@given(rows=ROWS)
def test_grpo_against_its_formula_in_float64(rows: list[Row]) -> None:
    given_scores = build(rows)
    got = advantages("grpo", given_scores, Normalisation())
    for index, (reward, group, _) in enumerate(rows):
        peers = [float(np.float32(other)) for other, its_group, _ in rows if its_group == group]
        mean = sum(peers) / len(peers)
        std = (sum((peer - mean) ** 2 for peer in peers) / (len(peers) - 1)) ** 0.5 if len(peers) > 1 else 0.0
        begin, end = given_scores.sequences.offsets[index : index + 2]
        mask = given_scores.sequences.response_mask[begin:end]
        divisor = std + 1e-6 if std > 1e-6 else 1.0
        np.testing.assert_allclose(got[begin:end], mask * (reward - mean) / divisor, rtol=1e-4, atol=1e-4)
