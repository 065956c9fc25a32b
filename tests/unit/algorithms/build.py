"""Helpers that build `Scores`, by hand and from random rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from roll.algorithms.advantages import Scores
from roll.data.packing import concatenate
from roll.types import Sequences


def responses(*masks: str) -> Sequences:
    """Return sequences with these masks, written as text: `..xx` is two prompt tokens and two response tokens."""
    return concatenate(
        [np.arange(len(mask), dtype=np.int32) for mask in masks],
        [np.array([letter == "x" for letter in mask]) for mask in masks],
    )


def scores(
    rewards: list[float],
    groups: list[int],
    masks: list[str],
    penalties: list[float] | None = None,
    baselines: list[float] | None = None,
) -> Scores:
    """Return scores of responses whose masks are written as text."""
    return Scores(
        responses(*masks),
        np.array(rewards, np.float32),
        np.array(groups, np.int32),
        None if penalties is None else np.array(penalties, np.float32),
        baselines=None if baselines is None else np.array(baselines, np.float32),
    )


Row = tuple[float, int, str]
ROWS = st.lists(
    st.tuples(
        st.floats(-100, 100, width=32),
        st.integers(0, 3),
        st.text("x.", min_size=1, max_size=6).map(lambda mask: "." + mask),
    ),
    min_size=1,
    max_size=12,
)
"""Random rows: reward, group and mask of each response."""


def build(rows: list[Row]) -> Scores:
    """Return scores of these rows. In group g, the greedy response has reward g, and the critic's value of every token
    is g / 2.
    """
    rewards, groups, masks = zip(*rows, strict=True)
    made = scores(list(rewards), list(groups), list(masks), baselines=[float(group) for group in groups])
    return replace(made, values=np.repeat(made.groups / 2, made.sequences.lengths).astype(np.float32))
