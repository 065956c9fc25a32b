"""Reward shaping and sample weights: overlong penalty, weights by difficulty and length, and the filter of long wrong
responses.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.shaping import (
    Overlong,
    balanced,
    difficulty_weights,
    is_long_and_wrong,
    length_weights,
    overlong_penalty,
)


def test_the_punishment_by_hand() -> None:
    # DAPO's own settings, in thousands of tokens: a limit of 20 and a buffer of 4.
    got = overlong_penalty(np.array([1, 16, 17, 18, 20], np.int32), Overlong(limit=20, buffer=4))
    assert got.tolist() == [0, 0, -0.25, -0.5, -1]
    assert overlong_penalty(np.array([18, 20], np.int32), Overlong(20, 4, factor=0.5)).tolist() == [-0.25, -0.5]


@given(lengths=st.lists(st.integers(1, 64), min_size=1), buffer=st.integers(1, 64))
def test_the_punishment_against_the_papers_cases(lengths: list[int], buffer: int) -> None:
    limit = 64
    for length, penalty in zip(
        lengths, overlong_penalty(np.array(lengths, np.int32), Overlong(limit, buffer)).tolist(), strict=True
    ):
        if length <= limit - buffer:
            assert penalty == 0
        else:
            assert penalty == pytest.approx(((limit - buffer) - length) / buffer, abs=1e-6)


def test_weights_by_hand() -> None:
    assert difficulty_weights(np.array([-1, 0, 0.5, 1, 3], np.float32)).tolist() == [0.5, 0.5, 1.25, 2, 2]
    assert length_weights(np.array([2, 4, 10], np.int32)).tolist() == [1.5, 1.25, 0.5]
    assert length_weights(np.array([3, 3], np.int32)).tolist() == [1.5, 1.5]
    assert length_weights(np.array([3, 4], np.int32)).tolist() == [1.5, 0.5]


def test_balanced_weights_average_1_over_unmasked_responses() -> None:
    chosen = np.array([True, False, True])
    got = balanced(np.array([1, 100, 3], np.float32), chosen)
    assert got.tolist() == [0.5, 50, 1.5]
    assert balanced(np.array([1, 3], np.float32), np.array([False, False])).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("reward", "length", "out"),
    [(0.0, 8, True), (-1.0, 9, True), (0.0, 7, False), (1.0, 8, False), (0.5, 99, False), (1e-6, 8, False)],
)
def test_what_is_long_and_wrong(reward: float, length: int, out: bool) -> None:
    assert is_long_and_wrong(reward, length, threshold=8) is out
