"""Sequence parallelism: splits the tokens of a packed row over the ranks of a replica (Jacobs et al., DeepSpeed-Ulysses, 2023).

Each of P ranks runs its share of the tokens through the layers. Around attention heads are exchanged for tokens: every rank attends
with its share of the heads over the whole row. The outputs of the model's head are gathered again, so that every rank
has the loss of the whole micro-batch. A rank has the gradients of its own tokens, whose sum over the ranks is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import distributed_c10d
from transformers import PreTrainedConfig

from roll.config.derived.model_shape import uneven_heads

Attention = Callable[..., tuple[Tensor, None]]
"""Attention function as transformers calls it: module, query, key, value [1, heads, T, D], mask, and keywords. Returns [1, T, heads, D]."""
ATTENTION = {"full_attention", "sliding_attention"}
"""Types of layers in which tokens interact only by attention."""
BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that depend on the row's length."""


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share a packed row, from the view of one of them."""

    name: str
    """Name of the process group."""
    rank: int
    """Rank of this process among them."""
    size: int

    @property
    def process_group(self) -> torch.distributed.ProcessGroup:
        return _named(self.name)


def _named(group: str) -> torch.distributed.ProcessGroup:
    return distributed_c10d._resolve_process_group(group)  # pyright: ignore[reportPrivateImportUsage, reportArgumentType]


@dataclass(frozen=True, eq=False)
class TokenShare:
    """The tokens of a packed row that a rank runs through the layers."""

    group: SequenceGroup
    width: int
    """Number of tokens of each rank's share. The row has the length of all shares together."""
    scored: NDArray[np.int64]
    """[S], ascending positions in the row of the requested tokens."""

    @property
    def tokens(self) -> slice:
        """This rank's, of the row."""
        return slice(self.group.rank * self.width, (self.group.rank + 1) * self.width)

    def counts(self, back: int) -> list[int]:
        """Return, by rank, the number of requested tokens whose hidden state, `back` tokens before them, is in its share."""
        edges = np.arange(self.group.size + 1) * self.width
        return np.diff(np.searchsorted(self.scored - back, edges)).tolist()

    def rows(self, back: int) -> slice:
        """Return this rank's slice of the requested tokens."""
        counts = self.counts(back)
        start = sum(counts[: self.group.rank])
        return slice(start, start + counts[self.group.rank])


def not_shared_out(config: PreTrainedConfig, size: int) -> str | None:
    """Return why a model's tokens cannot be split over `size` ranks, None if they can."""
    text = config.get_text_config()
    heads, keys = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if why := uneven_heads(heads, keys, size):
        return why
    if others := set(getattr(text, "layer_types", None) or ()) - ATTENTION:
        return f"the model has layers of {', '.join(sorted(others))}, which pass states from token to token"
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if (kind := rope.get("rope_type")) in BY_LENGTH:
        return f"the model's rotary embedding ({kind}) follows the longest position, of which each rank would see another"
    return None


@torch.library.custom_op("roll::all_to_all", mutates_args=(), schema="(Tensor parts, str group) -> Tensor")
def all_to_all(parts: Tensor, group: str) -> Tensor:
    """Send part r of [P, ...] to rank r of this process group. Return the parts from all ranks. An operator, for compiled layers."""
    received = torch.empty_like(parts)
    torch.distributed.all_to_all_single(received, parts, group=_named(group))
    return received


@all_to_all.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return torch.empty_like(parts)


def _remember(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _send_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return all_to_all(grad.contiguous(), ctx.group), None


all_to_all.register_autograd(_send_back, setup_context=_remember)


def over_ranks(kernel: Attention) -> Attention:
    """Return the same attention with a keyword `over`: the ranks that the tokens of query, key and value are split over."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        over: SequenceGroup | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        if over is None:
            return kernel(module, query, key, value, attention_mask, **more)
        out, _ = kernel(module, *to_heads(query, key, value, over), attention_mask, **more)
        return to_tokens(out, over), None

    return attend


def to_heads(query: Tensor, key: Tensor, value: Tensor, over: SequenceGroup) -> Sequence[Tensor]:
    """Exchange a share of the tokens with all heads, [1, heads, T / P, D], for all tokens with a share of the heads, [1, heads / P, T, D].

    Fewer key-value heads than ranks are copied, so that every rank has the one that its query heads use.
    """
    copies = max(1, over.size // key.shape[1])
    laid = [query, *(part.repeat_interleave(copies, dim=1) if copies > 1 else part for part in (key, value))]
    parts = [part[0].transpose(0, 1).unflatten(1, (over.size, -1)) for part in laid]
    mine = torch.cat(parts, dim=2).transpose(0, 1).contiguous()
    row = all_to_all(mine, over.name).flatten(0, 1)
    return [part.transpose(0, 1)[None] for part in row.split([part.shape[2] for part in parts], dim=1)]


def to_tokens(out: Tensor, over: SequenceGroup) -> Tensor:
    """Exchange attention's output for all tokens with a share of the heads, [1, T, heads / P, D], for [1, T / P, heads, D]."""
    shares = out[0].unflatten(0, (over.size, -1)).contiguous()
    return all_to_all(shares, over.name).transpose(0, 1).flatten(1, 2)[None]


def gather(values: Sequence[Tensor], counts: Sequence[int], over: SequenceGroup) -> tuple[Tensor, ...]:
    """Gather each rank's fp32 [K] values into [S] on every rank, where K is the rank's number in `counts`. Differentiable.

    Every rank then computes the same loss, and keeps the gradient of its own values.
    """
    if not sum(counts):
        return tuple(values)
    return _Gather.apply(list(counts), over, *values)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, counts: list[int], over: SequenceGroup, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.start, ctx.end = sum(counts[: over.rank]), sum(counts[: over.rank + 1])
        # A value that no loss uses has None as its gradient, which saves computing with zeros.
        ctx.set_materialize_grads(False)
        mine = torch.zeros(len(values), max(counts), dtype=torch.float32, device=values[0].device)
        for row, part in zip(mine, values, strict=True):
            row[: len(part)] = part
        every = [torch.empty_like(mine) for _ in counts]
        torch.distributed.all_gather(every, mine, group=over.process_group)
        return tuple(torch.cat([part[row, :count] for part, count in zip(every, counts, strict=True)]) for row in range(len(values)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None | Tensor, ...]:
        return None, None, *(None if grad is None else grad[ctx.start : ctx.end].contiguous() for grad in grads)
