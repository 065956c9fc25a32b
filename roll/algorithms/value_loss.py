"""The loss of a critic: the squared error of its values against the returns. Pure tensor functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from roll.algorithms.losses import Loss, LossInputs, TokenLosses


@dataclass(frozen=True)
class ValueLoss(Loss):
    """Value loss: 1/2 max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2), or 1/2 (V - R)^2 without a clip.

    V_old is the value before the step's first update, and R is the return. If the clipped value is further from the
    return, the token has no gradient. Source: OpenAI Baselines, ppo2; Huang et al., "The 37 Implementation Details of
    Proximal Policy Optimization", 2022, detail 9.
    """

    clip: float | None = None
    """c. None: no clipping."""

    metric_prefix: ClassVar[str] = "critic"

    def __call__(self, values: Tensor, inputs: LossInputs) -> TokenLosses:
        """See `Loss`. `values` are the critic's values [S]."""
        old, returns = inputs.values, inputs.returns
        assert old is not None and returns is not None, "the critic's loss needs old values and returns"
        free = (values - returns).square()
        if self.clip is None:
            larger, clipped = free, torch.zeros_like(free)
        else:
            # Equals old + clip(V - old), but without a rounding error if V is within the bounds.
            held = (values.clamp(old - self.clip, old + self.clip) - returns).square()
            larger, clipped = torch.maximum(free, held), (held > free).float()
        losses = 0.5 * larger
        return TokenLosses(losses, {"critic/loss": losses.detach(), "critic/clip_fraction": clipped})
