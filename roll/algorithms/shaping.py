"""Adjusts rewards, and responses' weights in the loss, by length and difficulty. Pure functions of numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll.types import Bools, Floats, Ints


@dataclass(frozen=True)
class Overlong:
    """Soft penalty of responses near the length limit."""

    limit: int
    """Number of tokens of the longest response."""
    buffer: int
    """Number of last tokens over which the penalty grows."""
    factor: float = 1.0
    """The penalty at the limit."""


def overlong_penalty(lengths: Ints, overlong: Overlong) -> Floats:
    """Return the addition to rewards [N]: 0 up to limit - buffer, then falling linearly to -factor at the limit.

    Source: DAPO, arXiv 2503.14476, eq. 13.
    """
    excess = lengths.astype(np.float64) - (overlong.limit - overlong.buffer)
    return (-overlong.factor * np.clip(excess / overlong.buffer, 0.0, 1.0)).astype(np.float32)


def is_long_and_wrong(reward: float, length: int, threshold: int) -> bool:
    """Whether a response failed, with a reward not above 0, and has `threshold` tokens or more.

    ROLL's `error_max_len_clip`, which also leaves out every response with a reward other than 0 and 1; here none of those go.
    """
    return reward <= 0 and length >= threshold


def difficulty_weights(difficulties: Floats) -> Floats:
    """Return weights [N], 0.5 for the easiest to 2 for the hardest: 0.5 + 1.5 clip(difficulty, 0, 1). ROLL's `difficulty_loss_weight`."""
    return (0.5 + 1.5 * np.clip(difficulties, 0.0, 1.0)).astype(np.float32)


def length_weights(lengths: Ints) -> Floats:
    """Return weights [N], linear from 1.5 for the shortest to 0.5 for the longest; 1.5 if all are equal. ROLL's `length_loss_weight`."""
    span = max(int(lengths.max()) - int(lengths.min()), 1)
    return (1.5 - (lengths - lengths.min()) / span).astype(np.float32)


def balanced(weights: Floats, chosen: Bools) -> Floats:
    """Scale the weights [N] to a mean of 1 over the chosen responses, so that they do not change the size of an update."""
    return (weights / weights[chosen].mean()).astype(np.float32) if chosen.any() else weights
