"""Selects tokens by the covariance of log-prob and advantage, over a whole step before it is split, in numpy.

Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", Cui et al., arXiv 2505.22617.
"""

from __future__ import annotations

import zlib

import numpy as np

from roll.types import Bools, TrainBatch


def token_covariances(batch: TrainBatch) -> np.ndarray:
    """Return float64 [T], (log old - mean)(A - mean), with means over the response tokens. Other tokens' values are meaningless."""
    old = batch.behaviour_log_probs if batch.proximal_log_probs is None else batch.proximal_log_probs
    assert old is not None, "covariances need log-probs from before the update"
    mask = batch.sequences.response_mask
    log_probs, advantages = old.astype(np.float64), batch.advantages.astype(np.float64)
    if not mask.any():
        return np.zeros(len(mask))
    return (log_probs - log_probs[mask].mean()) * (advantages - advantages[mask].mean())


def largest(covariances: np.ndarray, batch: TrainBatch, ratio: float) -> Bools:
    """Select [T] the share `ratio` of the response tokens, at least one, with the largest covariances. Of equal ones the first count."""
    where = np.flatnonzero(batch.sequences.response_mask)
    order = np.argsort(-covariances[where], kind="stable")
    return _chosen(where[order[: _count(len(where), ratio)]], len(covariances))


def some_between(covariances: np.ndarray, batch: TrainBatch, ratio: float, low: float, high: float) -> Bools:
    """Draw [T] tokens with a covariance in (low, high): a share `ratio` of all response tokens, or as many as there are.

    The draw is seeded by the step's own tokens, so a resumed run draws the same.
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
