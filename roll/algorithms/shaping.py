"""Adjusts rewards, and weights of responses in the loss, by length and difficulty. Functions of numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll.types import Bools, Floats, Ints


@dataclass(frozen=True)
class Overlong:
    """Settings of the soft penalty for responses near the length limit."""

    limit: int
    """Largest number of tokens of a response."""
    buffer: int
    """Number of tokens before the limit over which the penalty grows."""
    factor: float = 1.0
    """Penalty at the limit."""


def overlong_penalty(lengths: Ints, overlong: Overlong) -> Floats:
    """Return the values [N] to add to rewards: 0 for lengths up to limit - buffer, then decreasing linearly to -factor
    at the limit.

    Source: DAPO, arXiv 2503.14476, eq. 13.
    """
    excess = lengths.astype(np.float64) - (overlong.limit - overlong.buffer)
    return (-overlong.factor * np.clip(excess / overlong.buffer, 0.0, 1.0)).astype(np.float32)


def is_long_and_wrong(score: float, length: int, threshold: int) -> bool:
    """Return whether a response has at least `threshold` tokens and a score of at most 0.

    `error_max_len_clip` excludes such responses from the loss. ROLL's key of this name also excludes every response
    with a score other than 0 or 1.
    """
    return score <= 0 and length >= threshold


def difficulty_weights(difficulties: Floats) -> Floats:
    """Return weights [N] from 0.5 to 2 (hardest): 0.5 + 1.5 clip(difficulty, 0, 1). ROLL's `difficulty_loss_weight`."""
    return (0.5 + 1.5 * np.clip(difficulties, 0.0, 1.0)).astype(np.float32)


def length_weights(lengths: Ints) -> Floats:
    """Return weights [N], linear from 1.5 (shortest) to 0.5 (longest); 1.5 if equal. ROLL's `length_loss_weight`."""
    span = max(int(lengths.max()) - int(lengths.min()), 1)
    return (1.5 - (lengths - lengths.min()) / span).astype(np.float32)


def balanced(weights: Floats, chosen: Bools) -> Floats:
    """Return the weights [N], scaled to a mean of 1 over the chosen responses, which keeps an update's size."""
    return (weights / weights[chosen].mean()).astype(np.float32) if chosen.any() else weights
