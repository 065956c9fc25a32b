"""Muon and AdamW for whole tensors in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def orthogonal(gradient: Tensor) -> Tensor:
    """Let torch's own Muon apply the iteration, in bf16, which tests/unit/strategies/test_optimizers.py compares with
    the formula. In float64 it differs by a quarter: it enlarges what rounding adds to the small singular values.
    """
    weight = nn.Parameter(torch.zeros_like(gradient, dtype=torch.float32))
    weight.grad = gradient.float()
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    rows, columns = gradient.shape
    return -weight.detach().to(gradient.dtype) / max(1.0, rows / columns) ** 0.5


class PlainMuon:
    """Muon with momentum 0.95 for some matrices, scaled to the size of AdamW, and AdamW for the other parameters."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        hidden: Sequence[nn.Parameter],
        rate: float,
        decay: float,
        epsilon: float,
    ) -> None:
        """Create the optimizer. `groups` of one parameter each become groups of AdamW unless they are `hidden`."""
        own = {id(each) for each in hidden if each.requires_grad}
        self.matrices = [{**group, "lr": rate} for group in groups if id(group["params"][0]) in own]
        others = [group for group in groups if id(group["params"][0]) not in own]
        self.adamw = torch.optim.AdamW(others, lr=rate, eps=epsilon) if others else None
        self.param_groups = [*self.matrices, *(self.adamw.param_groups if self.adamw else [])]
        self.decay = decay
        self.momenta = [torch.zeros_like(group["params"][0]) for group in self.matrices]

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for group in self.param_groups:
            group["params"][0].grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Perform one update."""
        for number, group in enumerate(self.matrices):
            weight, rate = group["params"][0], group["lr"]
            self.momenta[number] = 0.95 * self.momenta[number] + 0.05 * weight.grad
            update = orthogonal(0.05 * weight.grad + 0.95 * self.momenta[number])
            weight.copy_(weight * (1 - rate * self.decay) - rate * 0.2 * max(weight.shape) ** 0.5 * update)
        if self.adamw:
            self.adamw.step()
