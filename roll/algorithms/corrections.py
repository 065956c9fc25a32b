"""Corrections for the mismatch between the policy that sampled and the trainer's policy: importance weights and
rejections. Pure functions.

At each token, delta = log old - log mu, where old is the trainer's policy at the start of the step, and mu is the
engine's policy at the version that sampled the token. delta includes the numerical mismatch of trainer and engine and,
in asynchronous training, staleness. Sources: truncated importance sampling, Yao et al., "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training", 2025; IcePop, Ling team, "Every Step Evolves", arXiv 2510.18855; sequence
and geometric weights and rejections, Liu et al., "When Speed Kills Stability", 2025; decoupled PPO, Hilton et al.,
arXiv 2110.00641, and AReaL, arXiv 2505.24298.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Protocol

import torch
from torch import Tensor

from roll.algorithms.methods import Level
from roll.algorithms.ratios import LARGEST_LOG_RATIO, sequence_mean, sequence_sum


@dataclass(frozen=True)
class Corrected:
    """A correction's result for S tokens."""

    weights: Tensor
    """[S], factor of each token's policy term; 0 for rejected tokens."""
    metrics: Mapping[str, Tensor]
    """Token metrics by name, [S] each."""


class MismatchCorrection(Protocol):
    """Computes a weight for each token. Implementations are frozen and picklable."""

    def __call__(self, delta: Tensor, lengths: Tensor) -> Corrected:
        """Return the weights of S tokens, given delta [S] and the response length of each sequence, [N]."""
        ...


@dataclass(frozen=True)
class Correction(MismatchCorrection):
    """Weights tokens by min(rho, cap), and rejects tokens with rho outside [low, high].

    rho is exp(delta) at the level `token`, exp(sum_y delta) at `sequence` and exp(mean_y delta) at `geometric`. A
    rejected token has weight 0 but still counts in the denominator of the mean, so that rejections do not scale up the
    other tokens.
    """

    weight: Level | None = None
    """Level of the rho in the weights. None: every token has weight 1."""
    cap: float | None = None
    """Upper bound of the weights. None: e^20."""
    reject: Level | None = None
    """Level of the rho that is compared with `low` and `high`. None: no token is rejected."""
    low: float = 0.0
    high: float = float("inf")

    def __call__(self, delta: Tensor, lengths: Tensor) -> Corrected:
        ratio = torch.zeros_like(delta) if self.weight is None else _at(self.weight, delta, lengths)
        # Clamp before exp, because the product of ratios over a long sequence may overflow.
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
