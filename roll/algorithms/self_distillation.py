"""The signal of a self-teacher: the policy with a longer prompt scores the tokens that it sampled with a shorter one.

S is the policy with the prompt x, and T the teacher with the prompt x' that also has hints. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from roll.types import Bools, Floats


@dataclass(frozen=True)
class TokenGains:
    """What a self-teacher says about the tokens of a step."""

    gains: Floats
    """[T], log T - log S of the tokens that the teacher scored, in nats; 0 for all others."""
    taught: Bools
    """[T], tokens that the teacher scored."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the step."""


def token_gains(teacher: Floats, student: Floats, clip: float | None = None) -> Floats:
    """Return log T(y_t | x', y_<t) - log S(y_t | x, y_<t), clipped to [-clip, clip].

    On tokens sampled by S it is an advantage whose policy gradient is that of -KL(S || T) at each token, with a fixed
    T. Sources: SDPO, arXiv 2601.20802; OPSD, arXiv 2601.18734, in their forms with sampled tokens.

    Args:
        teacher, student: natural log-probs of the same tokens, [S] each.
        clip: largest magnitude. None: no clip.
    """
    gains = teacher.astype(np.float64) - student.astype(np.float64)
    return (gains if clip is None else np.clip(gains, -clip, clip)).astype(np.float32)


def blended(advantages: Floats, taught: TokenGains, weight: float) -> Floats:
    """Return (1 - weight) A + weight G [T], with G = 0 for tokens that the teacher did not score.

    Source: arXiv 2601.20802, where lambda = 1 - weight weighs the advantages of GRPO.
    """
    return ((1 - weight) * advantages.astype(np.float64) + weight * taught.gains.astype(np.float64)).astype(np.float32)
