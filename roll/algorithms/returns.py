"""Sums over later rewards: discounted returns, generalised advantages, returns of turns.

Pure functions of ragged sequences, in float64. All sums are over the response tokens of one sequence and ignore tokens
outside the response mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll.algorithms.moments import Doubles
from roll.types import Floats, Ints, Sequences


@dataclass(frozen=True)
class EpisodeTurns:
    """The K turns of E episodes, ordered by episode."""

    rewards: Floats
    """[K], reward of each turn."""
    rows: Ints
    """[K], index of each turn's episode, non-decreasing."""
    of_token: Ints
    """[T], index of each token's turn. Tokens not sampled by the model belong to the next turn, or to the last turn if
    none follows.
    """
    states: Ints | None = None
    """[K], id of the environment's state before each turn. Equal ids mean equal states. None if states are unknown."""


def discounted(rewards: np.ndarray, sequences: Sequences, gamma: float) -> Doubles:
    """Return G [T], where G_t is the sum of gamma^(u - t) r_u over the response tokens u >= t of the sequence."""
    where, rows = _response_tokens(sequences)
    return _spread(_backward(rewards[where], rows, gamma), where, sequences)


def discounted_end(rewards: np.ndarray, sequences: Sequences, gamma: float) -> Doubles:
    """Return `discounted` [T] for rewards [N], each at the last token of its response: gamma^(distance to the last
    token) * reward.
    """
    if gamma == 1:
        # Allocate only one large array: for ten million tokens, allocations cost more than the computation.
        out = np.repeat(rewards.astype(np.float64), sequences.lengths)
        out[~sequences.response_mask] = 0.0
        return out
    where, rows = _response_tokens(sequences)
    last = np.searchsorted(rows, rows, side="right") - 1
    earned = rewards[rows] * gamma ** (last - np.arange(len(rows)))
    return _spread(earned.astype(np.float64), where, sequences)


def gae(
    rewards: np.ndarray, values: np.ndarray, sequences: Sequences, gamma: float, lam: float
) -> tuple[Doubles, Doubles]:
    """Return generalised advantage estimates and the critic's targets, [T] each.

    delta_t = r_t + gamma V_(t+1) - V_t with V = 0 after the last response token;
    A_t = sum over u >= t of (gamma lam)^(u - t) delta_u; return_t = A_t + V_t.
    Source: Schulman et al., arXiv 1506.02438, eq. 11 and 16.

    Args:
        rewards: [T], reward of each token.
        values: [T], the critic's value before each token.
        lam: lambda. With 1, the advantage is the return minus the value; with 0, it is the one-step error.
    """
    where, rows = _response_tokens(sequences)
    now = values[where].astype(np.float64)
    follows = np.zeros(len(now))
    if len(now) > 1:
        follows[:-1] = np.where(rows[1:] == rows[:-1], now[1:], 0.0)
    advantages = _backward(rewards[where] + gamma * follows - now, rows, gamma * lam)
    return _spread(advantages, where, sequences), _spread(advantages + now, where, sequences)


def turn_returns(rewards: np.ndarray, rows: np.ndarray, gamma: float) -> Doubles:
    """Return G [K], where G_k is the sum of gamma^(j - k) R_j over the turns j >= k of a response. The discount is per
    turn, not per token.

    Args:
        rewards, rows: [K], see `Turns`.
    """
    return _backward(rewards.astype(np.float64), rows, gamma)


def undivided(sequences: Sequences, rewards: Floats) -> EpisodeTurns:
    """Return turns in which each response is a single turn."""
    rows = np.arange(len(sequences), dtype=np.int32)
    return EpisodeTurns(rewards, rows, np.repeat(rows, sequences.lengths))


def _response_tokens(sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the response tokens, and the index of each token's sequence."""
    where = np.flatnonzero(sequences.response_mask)
    return where, np.repeat(np.arange(len(sequences)), sequences.lengths)[where]


def _backward(values: np.ndarray, rows: np.ndarray, decay: float) -> Doubles:
    """Return out [K] with out_i = values_i + decay * out_(i + 1) within each row. All rows are processed together, from
    their ends.

    Args:
        values: [K], ordered by row.
        rows: [K], row of each value, non-decreasing.
    """
    if not len(values):
        return np.zeros(0)
    rows = np.cumsum(np.diff(rows, prepend=rows[0]) != 0)
    counts = np.bincount(rows)
    longest, starts = int(counts.max()), np.cumsum(counts) - counts
    at = longest - counts[rows] + np.arange(len(rows)) - starts[rows]
    table = np.zeros((longest, len(counts)))
    table[at, rows] = values
    for step in range(longest - 2, -1, -1):
        table[step] += decay * table[step + 1]
    return table[at, rows]


def _spread(values: Doubles, where: np.ndarray, sequences: Sequences) -> Doubles:
    out = np.zeros(len(sequences.token_ids))
    out[where] = values
    return out
