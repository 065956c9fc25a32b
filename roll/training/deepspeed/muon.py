"""Muon on every ZeRO stage: orthogonal updates of the matrices of decoder layers, and AdamW for all other parameters.

ZeRO gives the optimizer flat parts of its groups, from which each rank here computes the update of the whole matrices
of which it has a part. DeepSpeed's own Muon does so while gradients are reduced. It then clips updates, not gradients,
by a norm of both, so that `max_grad_norm` would mean something else than on stage 0 and for other optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, all_reduce
from torch.optim import AdamW, Optimizer
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz

MOMENTUM = 0.95
SIZE_OF_ADAMW = 0.2
"""Root mean square of AdamW's usual updates, to which Muon's are scaled (https://arxiv.org/abs/2502.16982)."""


@dataclass(frozen=True)
class Matrix:
    """A matrix, and the slice of it in a rank's part of a group of parameters."""

    shape: tuple[int, int]
    start: int = 0
    """Position of the slice in the flattened part."""
    first: int = 0
    """Position of the slice in the flattened matrix."""
    count: int = 0
    """Number of values of the slice. 0 if the rank has nothing of the matrix."""
    group: ProcessGroup | None = None
    """The ranks that have slices of the matrix; None if one rank has all of it."""

    def own(self, part: Tensor) -> Tensor:
        """Return a view [count] of the slice in a rank's part."""
        return part.view(-1)[self.start : self.start + self.count]

    def gathered(self, own: Tensor) -> Tensor | None:
        """Return the matrix from the slices [count] of all ranks, on their device; None if this rank has nothing of it.

        If there is a group, all of its ranks must call this function.
        """
        if self.group is not None:
            whole = torch.zeros(prod(self.shape), dtype=own.dtype, device=own.device)
            whole[self.first : self.first + self.count] = own
            all_reduce(whole, group=self.group)
            own = whole
        return own.view(self.shape) if self.count else None


class Muon(Optimizer):
    """Muon for some groups (https://kellerjordan.github.io/posts/muon/), and torch's AdamW for the others.

    Muon's updates are scaled to the size of AdamW's, so that both can use the same learning rate.
    """

    def __init__(
        self, params: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, device: str
    ) -> None:
        """Create the optimizer. Groups with a true `hidden` use Muon, the others AdamW.

        Args:
            device: where matrices are gathered and made orthogonal: `cuda` also if parameters are in host memory.
        """
        others = [group for group in params if not group["hidden"]]
        self._adamw = AdamW(others, lr=lr, betas=betas, eps=eps) if others else None
        hidden = [group for group in params if group["hidden"]]
        super().__init__([*hidden, *(self._adamw.param_groups if self._adamw else [])], {"lr": lr, "weight_decay": 0.0})
        self._device = device
        self._matrices: dict[Tensor, list[Matrix]] = {}

    def divide(self, part: Tensor, matrices: list[Matrix]) -> None:
        """Say which matrices a flat parameter has parts of. Without that, a parameter is a whole matrix."""
        self._matrices[part] = matrices

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Perform one update."""
        for group in self.param_groups:
            for part in group["params"] if group["hidden"] else ():
                if part.grad is not None:
                    self._update(part, group["lr"], group["weight_decay"])
        if self._adamw:
            # Pass on the current groups and states: loading a checkpoint replaces them, and DeepSpeed puts master
            # weights into the groups.
            self._adamw.state = self.state
            self._adamw.param_groups = [group for group in self.param_groups if not group["hidden"]]
            self._adamw.step()

    def _update(self, part: nn.Parameter, rate: float, weight_decay: float) -> None:
        assert part.grad is not None
        state = self.state[part]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(part)
        momentum = state["momentum_buffer"]
        momentum.lerp_(part.grad, 1 - MOMENTUM)
        part.mul_(1 - rate * weight_decay)
        for matrix in self._matrices.get(part) or [Matrix(_sides(part), count=part.numel())]:
            update = matrix.own(part.grad).lerp(matrix.own(momentum), MOMENTUM)
            if (whole := matrix.gathered(update.to(self._device))) is not None:
                change = orthogonal(whole).reshape(-1)[matrix.first : matrix.first + matrix.count]
                step = rate * SIZE_OF_ADAMW * max(matrix.shape) ** 0.5
                matrix.own(part).add_(change.to(part.device), alpha=-step)


def orthogonal(update: Tensor) -> Tensor:
    """Return the nearest matrix with orthogonal rows or columns, in bf16, by torch's iteration."""
    return _zeropower_via_newtonschulz(update, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS)


def is_hidden(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix, before sharding by ZeRO-3."""
    return len(getattr(parameter, "ds_shape", parameter.shape)) == 2


def divide_matrices(engine: Any) -> None:
    """Tell an engine's Muon which matrices are in its flat parameters. Do nothing for other optimizers."""
    zero = engine.optimizer
    optimizer = getattr(zero, "optimizer", zero)
    if not isinstance(optimizer, Muon):
        return
    stage = engine.zero_optimization_stage()
    if stage in (1, 2):
        for number, part in enumerate(zero.single_partition_of_fp32_groups):
            if optimizer.param_groups[number]["hidden"]:
                optimizer.divide(part, list(_in_flat_group(zero, number)))
    elif stage == 3:
        for number, part in enumerate(zero.fp32_partitioned_groups_flat):
            if optimizer.param_groups[zero.sub_group_to_group_id[number]]["hidden"]:
                optimizer.divide(part, list(_in_shards(zero, number)))


def _in_flat_group(zero: Any, number: int) -> Iterator[Matrix]:
    """Yield the matrices of a group of ZeRO-1 and 2, which cuts the row of all parameters into equal parts."""
    group, size = zero.real_dp_process_group[number], int(zero.partition_size[number])
    begin = group.rank() * size
    pairs = zip(zero.round_robin_bit16_groups[number], zero.round_robin_bit16_offsets[number], strict=True)
    for parameter, offset in pairs:
        end = offset + parameter.numel()
        first, last = max(offset, begin), min(end, begin + size)
        is_cut = offset // size != (end - 1) // size
        if is_cut or first < last:
            count = max(0, last - first)
            own = (first - begin, first - offset, count) if count else (0, 0, 0)
            yield Matrix(_sides(parameter), *own, group=group if is_cut else None)


def _in_shards(zero: Any, number: int) -> Iterator[Matrix]:
    """Yield the matrices of a sub-group of ZeRO-3, which cuts each parameter into equal parts."""
    group = zero._get_sub_group_process_group(number)
    for parameter in zero.fp16_groups[number]:
        _, start, size = zero.grad_position[zero.get_param_id(parameter)]
        first = min(group.rank() * size, parameter.ds_numel)
        count = min(size, parameter.ds_numel - first)
        yield Matrix(_sides(parameter), start, first, count, group=group if group.size() > 1 else None)


def _sides(parameter: Tensor) -> tuple[int, int]:
    rows, columns = getattr(parameter, "ds_shape", parameter.shape)
    return int(rows), int(columns)
