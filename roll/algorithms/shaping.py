"""Lengths and difficulties: what they do to a reward and to a response's weight in the loss. Pure functions of numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll.types import Bools, Floats, Ints


@dataclass(frozen=True)
class Overlong:
    """Soft punishment of responses that come near the limit."""

    limit: int
    """Tokens of the longest response."""
    buffer: int
    """The punishment grows over the last so many tokens."""
    factor: float = 1.0
    """The punishment at the limit."""


def overlong_penalty(lengths: Ints, overlong: Overlong) -> Floats:
    """What is added to the rewards, [N]: 0 up to limit - buffer, then falling in a line to -factor at the limit.

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
    """0.5 for the easiest to 2 for the hardest, [N]: 0.5 + 1.5 clip(difficulty, 0, 1). As ROLL's `difficulty_loss_weight`."""
    return (0.5 + 1.5 * np.clip(difficulties, 0.0, 1.0)).astype(np.float32)


def length_weights(lengths: Ints) -> Floats:
    """1.5 for the shortest to 0.5 for the longest, [N], in a line; 1.5 where all are equally long. As ROLL's `length_loss_weight`."""
    span = max(int(lengths.max()) - int(lengths.min()), 1)
    return (1.5 - (lengths - lengths.min()) / span).astype(np.float32)


def balanced(weights: Floats, chosen: Bools) -> Floats:
    """The weights scaled to a mean of 1 over the chosen responses, [N], so that weighing leaves the size of an update as it is."""
    return (weights / weights[chosen].mean()).astype(np.float32) if chosen.any() else weights
