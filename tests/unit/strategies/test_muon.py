"""Muon on flat parts of matrices, as ZeRO cuts them, updates the matrices as Muon on the whole ones does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roll.training.deepspeed import muon
from roll.training.deepspeed.muon import Muon, divide_matrices
from tests import limits

SHAPES = [(6, 4), (3, 5), (8, 2), (4, 4), (1, 3)]
BETAS, RATE, DECAY, STEPS = (0.9, 0.99), 0.1, 0.2, 3


class Ranks:
    """A process group whose ranks are threads. `sum_over` takes the place of torch's all-reduce."""

    def __init__(self, size: int) -> None:
        self.count, self.own, self.barrier = size, threading.local(), threading.Barrier(size)
        self.given: dict[int, Tensor] = {}

    def rank(self) -> int:
        return self.own.rank

    def size(self) -> int:
        return self.count

    def sum_over(self, tensor: Tensor, group: Ranks) -> None:
        assert group is self
        self.given[self.rank()] = tensor.clone()
        self.barrier.wait(limits.CALL)
        tensor.copy_(torch.stack([self.given[rank] for rank in range(self.count)]).sum(0))
        self.barrier.wait(limits.CALL)


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def optimizer(parameters: Sequence[Tensor]) -> Muon:
    group = {"params": list(parameters), "hidden": True, "lr": RATE, "weight_decay": DECAY}
    return Muon([group], lr=RATE, betas=BETAS, eps=1e-8, device="cpu")


def whole() -> list[Tensor]:
    """Return the matrices after three updates of Muon on the whole ones."""
    matrices = [nn.Parameter(each) for each in values(0)]
    updates = optimizer(matrices)
    for number in range(STEPS):
        for matrix, gradient in zip(matrices, values(number + 1), strict=True):
            matrix.grad = gradient
        updates.step()
    return [matrix.detach() for matrix in matrices]


def flat_part(tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
    """Return a rank's part of the row of all matrices, as ZeRO-1 and 2 cut it."""
    row = torch.cat([each.flatten() for each in tensors])
    row = nn.functional.pad(row, (0, -len(row) % ranks))
    return row.view(ranks, -1)[rank].clone()


def shards(tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
    """Return a rank's parts of every matrix, as ZeRO-3 cuts them."""
    return torch.cat([flat_part([each], rank, ranks) for each in tensors])


def zero_of(stage: int, part: Tensor, matrices: list[Tensor], ranks: Ranks) -> Any:
    """Return the attributes of DeepSpeed's optimizers that say how matrices are cut."""
    if stage < 3:
        ends = torch.tensor([0] + [each.numel() for each in matrices]).cumsum(0).tolist()
        layout: dict[str, Any] = {"round_robin_bit16_groups": [matrices], "round_robin_bit16_offsets": [ends[:-1]]}
        layout |= {"single_partition_of_fp32_groups": [part], "partition_size": [len(part)]}
        return SimpleNamespace(real_dp_process_group=[ranks], **layout)
    sizes = [-(-each.numel() // ranks.size()) for each in matrices]
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    parameters = [
        SimpleNamespace(shape=torch.Size([0]), ds_shape=each.shape, ds_numel=each.numel(), number=number)
        for number, each in enumerate(matrices)
    ]
    return SimpleNamespace(
        fp16_groups=[parameters],
        fp32_partitioned_groups_flat=[part],
        sub_group_to_group_id={0: 0},
        get_param_id=lambda parameter: parameter.number,
        grad_position={number: [0, starts[number], size] for number, size in enumerate(sizes)},
        _get_sub_group_process_group=lambda number: ranks,
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(("stage", "cut"), [(1, flat_part), (2, flat_part), (3, shards)])
def test_parts_are_updated_as_whole_matrices(
    stage: int, cut: Callable[[Sequence[Tensor], int, int], Tensor], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Ranks(ranks)
    monkeypatch.setattr(muon, "all_reduce", group.sum_over)

    def updated(rank: int) -> Tensor:
        group.own.rank = rank
        part = nn.Parameter(cut(values(0), rank, ranks))
        zero = zero_of(stage, part, values(0), group)
        zero.optimizer = optimizer([part])
        divide_matrices(SimpleNamespace(optimizer=zero, zero_optimization_stage=lambda: stage))
        for number in range(STEPS):
            part.grad = cut(values(number + 1), rank, ranks)
            zero.optimizer.step()
            # As a run that is resumed does. Parameters stay the same objects.
            zero.optimizer.load_state_dict(zero.optimizer.state_dict())
        return part.detach()

    with ThreadPoolExecutor(ranks) as pool:
        parts = list(pool.map(updated, range(ranks)))
    for rank, part in enumerate(parts):
        torch.testing.assert_close(part, cut(whole(), rank, ranks), rtol=0, atol=1e-6)
    assert (whole()[0] - values(0)[0]).abs().max() > 0.1
