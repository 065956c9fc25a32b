"""Muon and AdamW by their formulas, for whole tensors in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def orthogonal(gradient: Tensor) -> Tensor:
    """Apply five steps of Muon's Newton-Schulz iteration (https://kellerjordan.github.io/posts/muon/)."""
    x = gradient / gradient.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


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
