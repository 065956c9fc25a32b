"""Invariance of advantage estimators to other prompts in the batch and to shifts of rewards, scaling, and the formula
of `reinforce`.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.advantages import ADVANTAGES, Normalisation, advantages
from tests.unit.algorithms.build import ROWS, Row, build, scores

BY_PROMPT = ["grpo", "dr_grpo", "rloo", "opo", "remax", "reinforce", "step_reinforce", "gigpo", "maxrl", "pass_at_k"]
"""Estimators whose advantages, by default, depend only on the responses to the same prompt."""
OF_THE_STEP = ["gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


def test_every_estimator_is_of_one_kind() -> None:
    """Except for `gae`, which needs a critic's values and is tested in test_gae.py."""
    assert sorted(BY_PROMPT + OF_THE_STEP) == sorted(set(ADVANTAGES) - {"gae"})


@given(rows=ROWS, estimator=st.sampled_from(BY_PROMPT), gamma=st.sampled_from([1.0, 0.5]))
def test_the_company_of_other_prompts_does_not_matter(rows: list[Row], estimator: str, gamma: float) -> None:
    norm = Normalisation(gamma=gamma)
    together = build(rows)
    whole = np.split(advantages(estimator, together, norm), together.sequences.offsets[1:-1])
    for group in {group for _, group, _ in rows}:
        chosen = [index for index, row in enumerate(rows) if row[1] == group]
        alone = advantages(estimator, build([rows[index] for index in chosen]), norm)
        np.testing.assert_allclose(alone, np.concatenate([whole[index] for index in chosen]), rtol=1e-5, atol=1e-5)


def shifted(rows: list[Row], shift: int) -> list[Row]:
    return [(round(reward) + shift, group, mask) for reward, group, mask in rows]


@given(
    rows=ROWS,
    shift=st.integers(-50, 50),
    scope=st.sampled_from(["batch", "group"]),
    std=st.sampled_from([None, "batch", "group"]),
)
def test_centred_estimators_ignore_a_reward_shift(rows: list[Row], shift: int, scope: str, std: str | None) -> None:
    norm = Normalisation(mean=scope, std=std, gamma=0.9)  # type: ignore[arg-type]
    expected, got = (advantages("reinforce", build(shifted(rows, by)), norm) for by in (0, shift))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)


@given(rows=ROWS, shift=st.integers(-50, 50))
def test_whitened_advantages_ignore_a_reward_shift(rows: list[Row], shift: int) -> None:
    rewards = [round(reward) for reward, _, mask in rows if "x" in mask]
    # With equal rewards, whitening returns the rounding error of their mean.
    tolerance = 1e-3 if len(set(rewards)) > 1 else 1e-1
    for estimator, norm in (("reinforce_plus_plus", Normalisation()), ("reinforce", Normalisation(whiten=True))):
        expected, got = (advantages(estimator, build(shifted(rows, by)), norm) for by in (0, shift))
        np.testing.assert_allclose(got, expected, atol=tolerance)


@given(rows=ROWS, shift=st.integers(-50, 50))
def test_remax_ignores_a_shift_of_both_rewards(rows: list[Row], shift: int) -> None:
    rewards, groups, masks = zip(*shifted(rows, 0), strict=True)

    def with_shift(by: int) -> np.ndarray:
        moved = scores(
            [reward + by for reward in rewards],
            list(groups),
            list(masks),
            baselines=[float(group + by) for group in groups],
        )
        return advantages("remax", moved, Normalisation())

    np.testing.assert_allclose(with_shift(shift), with_shift(0), rtol=1e-5, atol=1e-4)


@given(rows=ROWS, estimator=st.sampled_from(["reinforce", "step_reinforce"]), gamma=st.sampled_from([0.0, 0.5, 1.0]))
def test_doubled_rewards_double_plain_returns(rows: list[Row], estimator: str, gamma: float) -> None:
    doubled = [(2 * reward, group, mask) for reward, group, mask in rows]
    norm = Normalisation(gamma=gamma)
    twice, once = (advantages(estimator, build(given_rows), norm) for given_rows in (doubled, rows))
    # Below its smallest normal number, fp32 keeps fewer digits.
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-6, atol=float(np.finfo(np.float32).tiny))


@given(
    masks=st.lists(st.text("x.", min_size=1, max_size=6).map(lambda mask: "." + mask), min_size=1, max_size=6),
    gamma=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 99),
    centred=st.booleans(),
)
def test_reinforce_against_its_formula_in_float64(masks: list[str], gamma: float, seed: int, centred: bool) -> None:
    generator = np.random.default_rng(seed)
    rewards = generator.normal(size=len(masks)).astype(np.float32)
    penalties = generator.normal(size=sum(map(len, masks))).astype(np.float32)
    given_scores = scores(rewards.tolist(), [0] * len(masks), masks, penalties.tolist())
    got = advantages("reinforce", given_scores, Normalisation(mean="batch" if centred else None, gamma=gamma))
    mean = sum(map(float, rewards)) / len(rewards) if centred else 0.0
    for index, (begin, end) in enumerate(
        zip(given_scores.sequences.offsets, given_scores.sequences.offsets[1:], strict=False)
    ):
        tokens = [place for place in range(begin, end) if given_scores.sequences.response_mask[place]]
        for order, place in enumerate(tokens):
            paid = [
                -float(penalties[later]) + (float(rewards[index]) - mean) * (later == tokens[-1])
                for later in tokens[order:]
            ]
            assert got[place] == pytest.approx(
                sum(gamma**ahead * value for ahead, value in enumerate(paid)), rel=1e-4, abs=1e-5
            )
