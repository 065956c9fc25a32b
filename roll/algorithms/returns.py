"""Sums over later rewards: discounted returns, generalised advantages, returns of turns.

Pure functions of ragged sequences, in float64. A sum runs over the response tokens of one sequence; tokens outside the
response mask have no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll.algorithms.moments import Doubles
from roll.types import Floats, Ints, Sequences


@dataclass(frozen=True)
class Turns:
    """The turns of E episodes, K in all, one episode after another."""

    rewards: Floats
    """[K], reward of each turn."""
    rows: Ints
    """[K], episode of each turn, not decreasing."""
    of_token: Ints
    """[T], the turn of each token. Given tokens belong to the next turn, and after the last turn to that one."""
    states: Ints | None = None
    """[K], the environment's state before each turn: equal numbers are equal states. None if unknown."""


def discounted(rewards: np.ndarray, sequences: Sequences, gamma: float) -> Doubles:
    """Return [T] G_t = sum over u >= t of gamma^(u - t) r_u, over the response tokens of a sequence."""
    where, rows = _response_tokens(sequences)
    return _spread(_backward(rewards[where], rows, gamma), where, sequences)


def discounted_end(rewards: np.ndarray, sequences: Sequences, gamma: float) -> Doubles:
    """Return `discounted` [T] of responses with all their reward [N] at the last token: gamma^(distance to it) times the reward."""
    if gamma == 1:
        # One large array: in a step of ten million tokens, allocating more would cost more than the computation.
        out = np.repeat(rewards.astype(np.float64), sequences.lengths)
        out[~sequences.response_mask] = 0.0
        return out
    where, rows = _response_tokens(sequences)
    last = np.searchsorted(rows, rows, side="right") - 1
    earned = rewards[rows] * gamma ** (last - np.arange(len(rows)))
    return _spread(earned.astype(np.float64), where, sequences)


def gae(rewards: np.ndarray, values: np.ndarray, sequences: Sequences, gamma: float, lam: float) -> tuple[Doubles, Doubles]:
    """Return generalised advantage estimates and the critic's targets, [T] each.

    delta_t = r_t + gamma V_(t+1) - V_t with V = 0 after the last response token;
    A_t = sum over u >= t of (gamma lam)^(u - t) delta_u; return_t = A_t + V_t.
    Source: Schulman et al., arXiv 1506.02438, eq. 11 and 16.

    Args:
        rewards: [T], reward of each token.
        values: [T], what the critic expects before each token.
        lam: 1 gives the return less the value, 0 the one-step error.
    """
    where, rows = _response_tokens(sequences)
    now = values[where].astype(np.float64)
    follows = np.zeros(len(now))
    if len(now) > 1:
        follows[:-1] = np.where(rows[1:] == rows[:-1], now[1:], 0.0)
    advantages = _backward(rewards[where] + gamma * follows - now, rows, gamma * lam)
    return _spread(advantages, where, sequences), _spread(advantages + now, where, sequences)


def turn_returns(rewards: np.ndarray, rows: np.ndarray, gamma: float) -> Doubles:
    """Return [K] G_k = sum over j >= k of gamma^(j - k) R_j, over the turns of a response. The discount is by turn, not by token.

    Args:
        rewards, rows: [K], as of `Turns`.
    """
    return _backward(rewards.astype(np.float64), rows, gamma)


def undivided(sequences: Sequences, rewards: Floats) -> Turns:
    """Return each response as one turn."""
    rows = np.arange(len(sequences), dtype=np.int32)
    return Turns(rewards, rows, np.repeat(rows, sequences.lengths))


def _response_tokens(sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the response tokens, and the sequence of each."""
    where = np.flatnonzero(sequences.response_mask)
    return where, np.repeat(np.arange(len(sequences)), sequences.lengths)[where]


def _backward(values: np.ndarray, rows: np.ndarray, decay: float) -> Doubles:
    """Return [K] each value plus `decay` times the sum after it in its row. All rows are processed together, from their ends.

    Args:
        values: [K], laid out row after row.
        rows: [K], not falling.
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
