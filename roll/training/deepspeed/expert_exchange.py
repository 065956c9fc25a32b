"""A block of experts that few ranks divide: each rank gets the tokens of all of them, once.

AutoEP sends a copy of a token to each of its experts. Of `k` experts among `n` ranks, `k (n - 1) / n` copies leave the
rank, and as many results return. While `n` is at most `k`, nearly every token has experts on every rank, so it is
cheaper to gather the tokens (`n - 1` copies), to let each rank add up the results of its own experts, and to sum these
over the ranks. The rows are then sorted once instead of twice.

    tokens [T, H] ──gather──▶ [n T, H] ──rows of own experts──▶ [N, H] ──experts──▶ [N, H]
    output [T, H] ◀──sum over ranks── [n T, H] ◀──weighted sum of a token's rows──┘

Sums of a token's rows have a fixed order, so a recomputed forward pass repeats bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.ops.triton_ops.autoep_fused_token_ops import _FusedWeightedRestore
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather_single, reduce_scatter_single
from torch.nn.functional import pad


@dataclass(frozen=True)
class Rows:
    """The rows that this rank's experts compute, sorted by expert: one for each choice of a token."""

    tokens: Tensor
    """Int64 [N]: the gathered token of each row."""
    places: Tensor
    """Int32 [n T, K]: the row of each choice of each gathered token; -1 if another rank computes it."""
    counts: Tensor
    """Int32 [E / n]: number of rows of each of the rank's experts."""

    @classmethod
    def of(cls, chosen: Tensor, own: range, counts: Tensor, total: int) -> Rows:
        """Return the rows of the experts `own`.

        Args:
            chosen: int64 [n T, K], the numbers of each token's experts.
            counts: int32 [E / n], how often each of the experts was chosen; `total` is their sum.
        """
        here = torch.where((chosen >= own.start) & (chosen < own.stop), chosen, own.stop)
        order = torch.argsort(here.flatten(), stable=True)[:total]
        places = torch.full_like(here, -1, dtype=torch.int32)
        places.view(-1)[order] = torch.arange(total, dtype=torch.int32, device=chosen.device)
        return cls(order // chosen.shape[1], places, counts)


class TakeRows(torch.autograd.Function):
    """Copies the tokens [n T, H] of `Rows` to [N, H]. The gradient of a token is the sum over its rows."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: Rows) -> Tensor:
        ctx.places = rows.places
        return tokens.index_select(0, rows.tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ones = torch.ones(ctx.places.shape, dtype=torch.float32, device=ctx.places.device)
        return weighted_sums(gradients[0], ones, ctx.places), None


def weighted_sums(rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """Return the sum of each token's rows, multiplied by their weights and added in fp32, in the precision of `rows`.

    Args:
        rows: [N, H].
        weights: fp32 [n T, K].
        places: int32 [n T, K], see `Rows`.

    Returns:
        [n T, H].
    """
    if rows.is_cuda:
        return _FusedWeightedRestore.apply(rows, weights.contiguous(), places.flatten(), places.shape[1])
    with_none = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])  # the row of number -1
    return (with_none[places.long()] * weights.unsqueeze(2)).sum(1).to(rows.dtype)


def gathered(part: Tensor, ranks: int, group: ProcessGroup) -> Tensor:
    """Return the parts [T, ...] of all ranks one after another, [n T, ...]. Collective."""
    whole = part.new_empty(ranks * len(part), *part.shape[1:])
    all_gather_single(whole, part.contiguous(), group)
    return whole


def summed(whole: Tensor, ranks: int, group: ProcessGroup) -> Tensor:
    """Return this rank's part [T, ...] of the sum of the tensors [n T, ...] of all ranks. Collective."""
    part = whole.new_empty(len(whole) // ranks, *whole.shape[1:])
    reduce_scatter_single(part, whole.contiguous(), group=group)
    return part


class Gather(torch.autograd.Function):
    """`gathered`, with a gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: int, group: ProcessGroup) -> Tensor:
        ctx.ranks, ctx.group = ranks, group
        return gathered(part, ranks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return summed(gradients[0], ctx.ranks, ctx.group), None, None


class SumOverRanks(torch.autograd.Function):
    """`summed`, with a gradient."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: int, group: ProcessGroup) -> Tensor:
        ctx.ranks, ctx.group = ranks, group
        return summed(whole, ranks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gathered(gradients[0], ctx.ranks, ctx.group), None, None


class GatheringExperts(AutoEPMoELayer):
    """AutoEP's block, with the exchange of this module."""

    def forward(self, hidden_states: Tensor) -> Any:
        """See `AutoEPMoELayer.forward`. Collective of the ranks that have all experts together."""
        ranks = self.ep_size
        group: Any = self.ep_group
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen, counts = self.router(tokens, self.expert_bias)
        own = range(self.ep_rank * self.num_local_experts, (self.ep_rank + 1) * self.num_local_experts)
        said = gathered(torch.cat([counts, counts.new_full((1,), len(tokens))]), ranks, group).view(ranks, -1)
        on_host = said.tolist()
        room = max(int(line[-1]) for line in on_host) - len(tokens)
        chosen = gathered(pad(chosen, (0, 0, 0, room), value=self.num_experts), ranks, group)
        total = sum(int(count) for line in on_host for count in line[own.start : own.stop])
        rows = Rows.of(chosen, own, said[:, own.start : own.stop].sum(0, dtype=torch.int32), total)
        tokens_of_all = Gather.apply(pad(tokens, (0, 0, 0, room)), ranks, group)
        weights_of_all = Gather.apply(pad(weights, (0, 0, 0, room)), ranks, group)
        results = self.experts(TakeRows.apply(tokens_of_all, rows), rows.counts)
        sums = weighted_sums(results, weights_of_all, rows.places)
        output = SumOverRanks.apply(sums, ranks, group)[: len(tokens)].view_as(hidden_states)
        return self._finalize_output(output, tokens, hidden_states, hidden_states.shape[-1])
