"""Selects tokens by the covariance of log-prob and advantage. Works in numpy on the whole step, before it is split.

Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", Cui et al., arXiv 2505.22617.
"""

from __future__ import annotations

import zlib

import numpy as np

from roll.types import Bools, TrainBatch


def token_covariances(batch: TrainBatch) -> np.ndarray:
    """Return float64 [T], (log old - mean)(A - mean), with means over the response tokens. Values of other tokens are undefined."""
    old = batch.behaviour_log_probs if batch.proximal_log_probs is None else batch.proximal_log_probs
    assert old is not None, "covariances need log-probs from before the update"
    mask = batch.sequences.response_mask
    log_probs, advantages = old.astype(np.float64), batch.advantages.astype(np.float64)
    if not mask.any():
        return np.zeros(len(mask))
    return (log_probs - log_probs[mask].mean()) * (advantages - advantages[mask].mean())


def largest(covariances: np.ndarray, batch: TrainBatch, ratio: float) -> Bools:
    """Mark [T] the response tokens with the largest covariances: a fraction `ratio` of them, at least one. Ties go to the first token."""
    where = np.flatnonzero(batch.sequences.response_mask)
    order = np.argsort(-covariances[where], kind="stable")
    return _chosen(where[order[: _count(len(where), ratio)]], len(covariances))


def some_between(covariances: np.ndarray, batch: TrainBatch, ratio: float, low: float, high: float) -> Bools:
    """Mark [T] random response tokens with a covariance in (low, high).

    Their number is a fraction `ratio` of all response tokens, at least one, or all tokens in the interval if there are fewer. The token
    ids of the step seed the draw, so a resumed run draws the same tokens.
    """
    sequences = batch.sequences
    where = np.flatnonzero(sequences.response_mask & (covariances > low) & (covariances < high))
    count = min(_count(int(sequences.response_mask.sum()), ratio), len(where))
    random = np.random.default_rng(zlib.crc32(sequences.token_ids.tobytes()))
    return _chosen(random.choice(where, count, replace=False), len(covariances))


def _count(tokens: int, ratio: float) -> int:
    return min(max(int(ratio * tokens), 1), tokens)


def _chosen(where: np.ndarray, tokens: int) -> Bools:
    out = np.zeros(tokens, np.bool_)
    out[where] = True
    return out
