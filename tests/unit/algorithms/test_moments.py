"""Running moments, standardisation over groups, batches and domains, and whitening."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.moments import RunningMoments, standardise, whiten


@given(parts=st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=8), max_size=6))
def test_running_moments_are_those_of_all_values_together(parts: list[list[float]]) -> None:
    moments = RunningMoments()
    for part in parts:
        moments = moments.joined(np.array(part, np.float32))
    together = np.array([value for part in parts for value in part])
    assert moments.count == len(together)
    assert moments.mean == pytest.approx(together.mean() if len(together) else 0.0, abs=1e-6)
    assert moments.std == pytest.approx(together.std(ddof=1) if len(together) > 1 else 0.0, abs=1e-3)


def test_running_scopes_take_the_moments_that_are_given() -> None:
    rewards, groups = np.array([1.0, 5.0]), np.array([0, 1], np.int32)
    moments = RunningMoments(count=5, mean=3.0, squares=16.0)
    np.testing.assert_allclose(standardise(rewards, groups, "running", "running", moments), [-1, 1], rtol=1e-6)
    np.testing.assert_allclose(standardise(rewards, groups, None, "running", moments), [0.5, 2.5], rtol=1e-6)
    with pytest.raises(AssertionError, match="running moments"):
        standardise(rewards, groups, "running", None)


@given(values=st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(0, 3)), min_size=1, max_size=12))
def test_domain_is_standardised_like_a_batch(values: list[tuple[float, int]]) -> None:
    rewards, domains = np.array([value for value, _ in values]), np.array([domain for _, domain in values], np.int32)
    got = standardise(rewards, np.arange(len(values), dtype=np.int32), "domain", "domain", domains=domains)
    for domain in range(4):
        own = rewards[domains == domain]
        if len(own):
            expected = standardise(own, np.arange(len(own), dtype=np.int32), "batch", "batch")
            np.testing.assert_allclose(got[domains == domain], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("variance", "expected"), [(0.0, 5.0), (1e-12, 5.0), (4e-12, 5 / 3e-6)])
def test_tiny_standard_deviation_counts_as_zero(variance: float, expected: float) -> None:
    """Rewards are not divided by a standard deviation of 1e-6, but are divided by one of 2e-6."""
    moments = RunningMoments(count=2, mean=5.0, squares=variance)
    assert standardise(np.array([5.0]), np.array([0], np.int32), None, "running", moments) == pytest.approx(expected)


@pytest.mark.parametrize("value", [33.3, 1e4, -1 / 3])
def test_whitening_what_is_all_alike_gives_zero(value: float) -> None:
    got = whiten(np.full(7, value, np.float32), np.ones(7, np.bool_))
    np.testing.assert_allclose(got, 0, atol=1e-4)


@given(values=st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=20), seed=st.integers(0, 99))
def test_whitened_tokens_have_mean_0_and_variance_1(values: list[float], seed: int) -> None:
    mask = np.random.default_rng(seed).random(len(values)) < 0.7
    got = whiten(np.array(values), mask)
    assert not got[~mask].any()
    if mask.any() and np.ptp(np.array(values)[mask]) > 0.1:
        assert got[mask].mean() == pytest.approx(0, abs=1e-6)
        assert got[mask].std(ddof=1) == pytest.approx(1, abs=1e-4)
