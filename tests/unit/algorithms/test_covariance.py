"""Covariances of log-probs and advantages, and the tokens that `clip_cov` and `kl_cov` select by them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.objectives import ClipCov, Gspo, KlCov, any_between, largest, token_covariances
from roll.data.packing import concatenate
from roll.types import Floats, TrainBatch


def batch(log_probs: list[float], advantages: list[float], mask: str, proximal: Floats | None = None) -> TrainBatch:
    """Return a batch of one sequence."""
    sequences = concatenate([np.arange(len(mask), dtype=np.int32)], [np.array([letter == "x" for letter in mask])])
    versions = np.zeros(len(mask), np.int32)
    return TrainBatch(
        sequences, np.array(advantages, np.float32), np.array(log_probs, np.float32), versions, None, proximal
    )


def test_covariances_by_hand() -> None:
    # Means over the response: log-prob -2, advantage 1. Including the prompt would shift both.
    step = batch([0, -1, -2, -3], [0, 3, 0, 0], ".xxx")
    np.testing.assert_allclose(token_covariances(step)[1:], [2, 0, 1])


def test_covariance_prefers_proximal_log_probs() -> None:
    step = batch([0, -9, -9, -9], [0, 3, 0, 0], ".xxx", np.array([0, -1, -2, -3], np.float32))
    np.testing.assert_allclose(token_covariances(step)[1:], [2, 0, 1])


def test_largest_covariances_are_a_share_of_tokens() -> None:
    step = batch([0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], "..xxxx")
    covariances = np.array([9, 9, 1, 4, 2, 3], np.float64)
    assert largest(covariances, step, 0.5).tolist() == [False, False, False, True, False, True]
    assert largest(covariances, step, 1e-9).sum() == 1
    assert largest(covariances, step, 1.0).tolist() == step.sequences.response_mask.tolist()
    assert largest(covariances, batch([0], [0], "."), 0.5).sum() == 0


def test_some_between_are_drawn_from_between() -> None:
    step = batch([0] * 8, [0] * 8, ".xxxxxxx")
    covariances = np.array([3, 0, 1, 2, 3, 4, 5, 6], np.float64)
    drawn = any_between(covariances, step, 2 / 7, 1, 5)
    assert drawn.sum() == 2
    assert not drawn[[0, 1, 2, 6, 7]].any()
    assert any_between(covariances, step, 1.0, 1, 5).tolist() == [False] * 3 + [True] * 3 + [False] * 2
    assert any_between(covariances, step, 1.0, 7, 9).sum() == 0
    assert any_between(covariances, step, 2 / 7, 1, 5).tolist() == drawn.tolist()


def test_other_tokens_draw_others() -> None:
    covariances = np.full(41, 2.0)
    first = any_between(covariances, batch([0] * 41, [0] * 41, "." + "x" * 40), 0.5, 1, 5)
    other = batch([0] * 41, [0] * 41, "." + "x" * 40)
    other.sequences.token_ids[3] = 99
    assert any_between(covariances, other, 0.5, 1, 5).tolist() != first.tolist()


def test_objectives_mark_by_their_keys() -> None:
    step = batch([0, -1, -2, -3], [0, 3, 0, 0], ".xxx")
    np.testing.assert_array_equal(KlCov(ratio=0.5).token_selection(step), [False, True, False, False])
    np.testing.assert_array_equal(
        ClipCov(ratio=1.0, low=0.5, high=1.5).token_selection(step), [False, False, False, True]
    )
    assert Gspo().token_selection(step) is None
    with pytest.raises(AssertionError, match="before the update"):
        KlCov().token_selection(TrainBatch(step.sequences, step.advantages, None, step.policy_versions))


@given(
    values=st.lists(st.tuples(st.floats(-5, 0, width=32), st.floats(-3, 3, width=32)), min_size=1, max_size=30),
    ratio=st.floats(0, 1),
    shift=st.floats(-4, 4, width=16),
)
def test_covariances_average_to_covariance_and_ignore_shifts(
    values: list[tuple[float, float]], ratio: float, shift: float
) -> None:
    log_probs, advantages = (list(column) for column in zip(*values, strict=True))
    step = batch([0, *log_probs], [0, *advantages], "." + "x" * len(values))
    covariances = token_covariances(step)
    x, y = np.array(log_probs, np.float64), np.array(advantages, np.float64)
    assert covariances[1:].mean() == pytest.approx(np.mean(x * y) - x.mean() * y.mean(), abs=1e-9)
    moved = batch([0, *(value + shift for value in log_probs)], [0, *advantages], "." + "x" * len(values))
    np.testing.assert_allclose(token_covariances(moved)[1:], covariances[1:], atol=1e-4)
    chosen = largest(covariances, step, ratio)
    assert chosen.sum() == max(int(ratio * len(values)), 1)
    assert not chosen[0]
    if not chosen[1:].all():
        assert covariances[chosen].min() >= covariances[1:][~chosen[1:]].max()
