"""Corrections for the difference between the policy that sampled and the trainer's: weights and rejections. Pure.

With delta = log old - log mu at each token, old the trainer's policy at the step's start and mu the engine at the version that
sampled the token, delta holds both what their arithmetic differs by and, in asynchronous training, the token's staleness.
Sources: truncated importance sampling, Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
2025; IcePop, Ling team, "Every Step Evolves", arXiv 2510.18855; sequence and geometric weights and rejections, Liu et al.,
"When Speed Kills Stability", 2025; decoupled PPO, Hilton et al., arXiv 2110.00641, and AReaL, arXiv 2505.24298.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Protocol

import torch
from torch import Tensor

from roll.algorithms.methods.corrections import Level
from roll.algorithms.ratios import LARGEST_LOG_RATIO
from roll.algorithms.segments import sequence_mean, sequence_sum


@dataclass(frozen=True)
class Corrected:
    """A correction's result for S tokens."""

    weights: Tensor
    """[S], factor of the token's policy term, 0 for rejected tokens."""
    metrics: Mapping[str, Tensor]
    """[S] each."""


class MismatchCorrection(Protocol):
    """Weights tokens. Implementations are frozen and picklable."""

    def __call__(self, delta: Tensor, lengths: Tensor) -> Corrected:
        """Return the weights for delta [S] and the sequences' response lengths [N]."""
        ...


@dataclass(frozen=True)
class Correction(MismatchCorrection):
    """Weight min(rho, cap), and reject where rho is outside [low, high].

    rho is exp(delta) at the level `token`, exp(sum_y delta) at `sequence` and exp(mean_y delta) at `geometric`. A rejected
    token has weight 0 and still counts in the mean over tokens: dividing by what is left would scale up the others.
    """

    weight: Level | None = None
    """Upper bound of weights. None gives every token the weight 1."""
    cap: float | None = None
    """None caps at e^20 alone."""
    reject: Level | None = None
    """None rejects nothing."""
    low: float = 0.0
    high: float = float("inf")

    def __call__(self, delta: Tensor, lengths: Tensor) -> Corrected:
        """See `MismatchCorrection`."""
        ratio = torch.zeros_like(delta) if self.weight is None else _at(self.weight, delta, lengths)
        # Before exp: the product over a long sequence may overflow.
        capped = ratio.clamp(max=LARGEST_LOG_RATIO if self.cap is None else min(log(self.cap), LARGEST_LOG_RATIO))
        kept = torch.ones_like(delta, dtype=torch.bool)
        if self.reject is not None:
            judged = _at(self.reject, delta, lengths).exp()
            kept = (judged >= self.low) & (judged <= self.high)
        weights = torch.where(kept, capped.exp(), 0.0)
        metrics = {
            "mismatch/weight": weights,
            "mismatch/capped_fraction": (capped < ratio).float(),
            "mismatch/rejected_fraction": (~kept).float(),
        }
        return Corrected(weights, metrics)


def _at(level: Level, delta: Tensor, lengths: Tensor) -> Tensor:
    match level:
        case "token":
            return delta
        case "sequence":
            return sequence_sum(delta, lengths)
        case "geometric":
            return sequence_mean(delta, lengths)
