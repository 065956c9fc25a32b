"""The estimators beside grpo and reinforce: by hand, against their formulas, and what they must be blind to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.advantages import Normalisation, Scores, advantages
from tests.unit.algorithms.build import ROWS, Row, build, scores

NONE = Normalisation()
CENTRED = ["grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"]
"""Estimators that compare the responses to one prompt."""


def by_response(estimator: str, given_scores: Scores, norm: Normalisation = NONE) -> list[float]:
    """Advantage of each response's last token."""
    return advantages(estimator, given_scores, norm)[given_scores.sequences.offsets[1:] - 1].tolist()


FIVE = scores([0, 1, 1, 2, 6], [0, 0, 1, 1, 1], [".x", ".xxx", ".x", ".xx", "..x"])


def test_dr_grpo_subtracts_the_mean_alone() -> None:
    assert by_response("dr_grpo", FIVE) == pytest.approx([-0.5, 0.5, -2, -1, 3])


def test_rloo_leaves_the_response_itself_out() -> None:
    # Others' means: 1, 0; 4, 7/2, 3/2.
    assert by_response("rloo", FIVE) == pytest.approx([-1, 1, -3, -1.5, 4.5])


def test_opo_weighs_the_baseline_by_length() -> None:
    # Group 0: (1 x 0 + 3 x 1) / 4. Group 1: (1 + 4 + 6) / 4.
    assert by_response("opo", FIVE) == pytest.approx([-0.75, 0.25, -1.75, -0.75, 3.25])


def test_opo_weighs_masked_responses_by_their_true_length() -> None:
    masked = replace(scores([0, 4], [0, 0], [".x", "...."]), lengths=np.array([1, 3], np.int32))
    assert by_response("opo", masked)[0] == pytest.approx(-3)


def test_gpg_makes_up_for_groups_that_teach_nothing() -> None:
    # Group 1 is all alike: 2 of 5 responses count, and each counts 5/2 times.
    assert by_response("gpg", scores([0, 1, 3, 3, 3], [0, 0, 1, 1, 1], [".x"] * 5)) == pytest.approx([-1.25, 1.25, 0, 0, 0])
    assert by_response("gpg", FIVE) == pytest.approx(by_response("dr_grpo", FIVE))


def test_remax_subtracts_what_the_greedy_response_got() -> None:
    given_scores = scores([1, 0, 3], [0, 0, 1], [".xx", ".x", ".x"], baselines=[0.5, 0.5, 4])
    assert advantages("remax", given_scores, NONE).tolist() == [0, 0.5, 0.5, 0, -0.5, 0, -1]
    # Discounted by a half, the first token of the first response expects 1/2.
    assert advantages("remax", given_scores, Normalisation(gamma=0.5)).tolist() == [0, 0, 0.5, 0, -0.5, 0, -1]
    # The baseline is clipped with the rewards.
    assert by_response("remax", given_scores, Normalisation(reward_clip=2)) == pytest.approx([0.5, -0.5, 0])
    with pytest.raises(AssertionError, match="without greedy responses"):
        advantages("remax", scores([1], [0], [".x"]), NONE)


def test_reinforce_plus_plus_whitens_over_tokens() -> None:
    # Tokens: 1 once and 4 three times: mean 13/4, variance 27/16.
    low, high = -2.25 / (27 / 16) ** 0.5, 0.75 / (27 / 16) ** 0.5
    got = advantages("reinforce_plus_plus", scores([1, 4], [0, 1], ["..x", ".xxx"]), NONE)
    np.testing.assert_allclose(got, [0, 0, low, 0, high, high, high], rtol=3e-6)


def test_reinforce_plus_plus_discounts_and_penalises_before_it_whitens() -> None:
    # Immediate -1 and 5 - 1 = 4; discounted by a half: 1 and 4.
    got = advantages("reinforce_plus_plus", scores([5], [0], [".xx"], [0, 1, 1]), Normalisation(gamma=0.5))
    np.testing.assert_allclose(got, [0, -1, 1], rtol=1e-5)


def test_reinforce_plus_plus_baseline_whitens_what_is_left_of_the_groups() -> None:
    # Centred: -1/2, 1/2 on three tokens; mean 1/4, variance (9/16 + 3/16) / 4 = 3/16.
    got = by_response("reinforce_plus_plus_baseline", scores([0, 1], [0, 0], [".x", ".xxx"]))
    assert got == pytest.approx([-0.75 / (3 / 16) ** 0.5, 0.25 / (3 / 16) ** 0.5], rel=1e-5)


@pytest.mark.parametrize("estimator", ["dr_grpo", "rloo", "opo", "gpg", "remax"])
def test_penalties_are_paid_by_every_token_at_or_before_them(estimator: str) -> None:
    plain = scores([5, 1], [0, 0], [".xx", ".x"], baselines=[0, 0])
    fined = scores([5, 1], [0, 0], [".xx", ".x"], [9, 1, 2, 9, 4], baselines=[0, 0])
    np.testing.assert_allclose(advantages(estimator, plain, NONE) - advantages(estimator, fined, NONE), [0, 3, 2, 0, 4], rtol=1e-6)


@pytest.mark.parametrize("estimator", CENTRED)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.3, 1e4])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_groups_of_equal_rewards_teach_nothing(estimator: str, reward: float, size: int) -> None:
    got = advantages(estimator, scores([reward] * size, [0] * size, [".xx"] * size), NONE)
    np.testing.assert_allclose(got, 0, atol=1e-5)


@settings(deadline=None)
@given(rows=ROWS, shift=st.floats(-50, 50), estimator=st.sampled_from(CENTRED))
def test_a_reward_that_all_responses_get_changes_nothing(rows: list[Row], shift: float, estimator: str) -> None:
    rows = [(round(reward), group, mask) for reward, group, mask in rows]
    moved = [(reward + round(shift), group, mask) for reward, group, mask in rows]
    np.testing.assert_allclose(advantages(estimator, build(moved), NONE), advantages(estimator, build(rows), NONE), rtol=1e-4, atol=1e-4)


@settings(deadline=None)
@given(rows=ROWS, estimator=st.sampled_from(["grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]))
def test_doubled_rewards_change_nothing_where_a_deviation_divides(rows: list[Row], estimator: str) -> None:
    rows = [(round(reward), group, mask) for reward, group, mask in rows]
    doubled = [(2 * reward, group, mask) for reward, group, mask in rows]
    np.testing.assert_allclose(advantages(estimator, build(doubled), NONE), advantages(estimator, build(rows), NONE), rtol=1e-4, atol=1e-4)


@settings(deadline=None)
@given(rows=ROWS, estimator=st.sampled_from(["dr_grpo", "rloo", "opo", "gpg"]))
def test_doubled_rewards_double_advantages_elsewhere(rows: list[Row], estimator: str) -> None:
    doubled = [(2 * reward, group, mask) for reward, group, mask in rows]
    twice, once = advantages(estimator, build(doubled), NONE), advantages(estimator, build(rows), NONE)
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-5, atol=1e-4)


def formula(estimator: str, rows: list[Row], index: int) -> float:
    """The advantage of one response, as the papers tell it, in float64."""
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


@settings(deadline=None)
@given(rows=ROWS, estimator=st.sampled_from(["dr_grpo", "rloo", "opo", "gpg", "remax"]))
def test_against_the_formula_in_float64(rows: list[Row], estimator: str) -> None:
    given_scores = build(rows)
    got = advantages(estimator, given_scores, NONE)
    for index in range(len(rows)):
        begin, end = given_scores.sequences.offsets[index : index + 2]
        mask = given_scores.sequences.response_mask[begin:end]
        np.testing.assert_allclose(got[begin:end], mask * formula(estimator, rows, index), rtol=1e-4, atol=1e-3)


@settings(deadline=None)
@given(rows=ROWS, estimator=st.sampled_from(["reinforce_plus_plus", "reinforce_plus_plus_baseline"]))
def test_whitened_estimators_against_the_formula_in_float64(rows: list[Row], estimator: str) -> None:
    given_scores = build(rows)
    mask = given_scores.sequences.response_mask
    values = [row[0] if estimator == "reinforce_plus_plus" else formula("dr_grpo", rows, index) for index, row in enumerate(rows)]
    tokens = np.array([value for value, row in zip(values, rows, strict=True) for _ in range(row[2].count("x"))])
    if not len(tokens):
        return
    spread = (sum((tokens - tokens.mean()) ** 2) / len(tokens)) ** 0.5
    expected = (tokens - tokens.mean()) / (spread + 1e-6)
    np.testing.assert_allclose(advantages(estimator, given_scores, NONE)[mask], expected, rtol=1e-3, atol=1e-3)
