"""Sequence parallelism: splits the tokens of a packed row over the ranks of a replica (Jacobs et al.,
DeepSpeed-Ulysses, 2023).

Each of P ranks runs its share of the tokens through the layers. For attention, an all-to-all exchanges tokens for
heads, so that each rank computes its share of the heads over the whole row. The outputs of the model's head are
gathered, so that every rank computes the loss of the whole micro-batch. Each rank has the gradients from its own
tokens, and their sum over the ranks is the full gradient.
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
"""Attention function in transformers' interface: (module, query, key, value [1, heads, T, D], mask, keywords) -> [1, T,
heads, D], None.
"""
ATTENTION = {"full_attention", "sliding_attention"}
"""Types of layers in which tokens interact only through attention."""
BY_LENGTH = ("dynamic", "longrope")
"""Types of rotary embeddings that depend on the length of the row."""


@dataclass(frozen=True)
class SequenceGroup:
    """The group of ranks that split a packed row, as seen by one of them."""

    name: str
    rank: int
    size: int

    @property
    def process_group(self) -> torch.distributed.ProcessGroup:
        """Return the process group."""
        return _named(self.name)


def _named(group: str) -> torch.distributed.ProcessGroup:
    return distributed_c10d._resolve_process_group(group)  # pyright: ignore[reportPrivateImportUsage, reportArgumentType]


@dataclass(frozen=True, eq=False)
class TokenShare:
    """The tokens of a packed row that a rank runs through the layers."""

    group: SequenceGroup
    width: int
    """Number of tokens in each rank's share. The row has `width * group.size` tokens."""
    scored: NDArray[np.int64]
    """[S], ascending positions of the scored tokens in the row."""

    @property
    def tokens(self) -> slice:
        """Return this rank's slice of the tokens in the row."""
        return slice(self.group.rank * self.width, (self.group.rank + 1) * self.width)

    def counts(self, back: int) -> list[int]:
        """Return each rank's number of scored tokens whose state, `back` positions before, is in its share."""
        edges = np.arange(self.group.size + 1) * self.width
        return np.diff(np.searchsorted(self.scored - back, edges)).tolist()

    def rows(self, back: int) -> slice:
        """Return this rank's slice of the scored tokens; see `counts`."""
        counts = self.counts(back)
        start = sum(counts[: self.group.rank])
        return slice(start, start + counts[self.group.rank])


def not_shared_out(config: PreTrainedConfig, size: int, sharers: int = 1) -> str | None:
    """Return why a model's tokens cannot be split over `size` ranks, each of which has the heads of one of `sharers`
    tensor-parallel ranks, or None if they can.
    """
    text = config.get_text_config()
    heads, keys = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % sharers == 0 == keys % sharers and (why := uneven_heads(heads // sharers, keys // sharers, size)):
        return f"{why}, after tensor parallelism over {sharers}" if sharers > 1 else why
    if others := set(getattr(text, "layer_types", None) or ()) - ATTENTION:
        return f"the model has layers of {', '.join(sorted(others))}, which pass states from token to token"
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if (kind := rope.get("rope_type")) in BY_LENGTH:
        return (
            f"the model's rotary embedding ({kind}) depends on the longest position, which would differ between ranks"
        )
    return None


@torch.library.custom_op("roll::all_to_all", mutates_args=(), schema="(Tensor parts, str group) -> Tensor")
def all_to_all(parts: Tensor, group: str) -> Tensor:
    """Send part r of [P, ...] to rank r of the group, and return all ranks' parts. A custom op, for compiled layers."""
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
    """Return the attention function with a keyword `over`: the ranks over which its tokens are split."""

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
        if (sinks := more.get("s_aux")) is not None:
            more["s_aux"] = sinks.chunk(over.size)[over.rank]
        out, _ = kernel(module, *to_heads(query, key, value, over), attention_mask, **more)
        return split_tokens(out, over), None

    return attend


def to_heads(query: Tensor, key: Tensor, value: Tensor, over: SequenceGroup) -> Sequence[Tensor]:
    """Convert [1, heads, T / P, D] (all heads, this rank's tokens) to [1, heads / P, T, D] (this rank's heads, all
    tokens).

    If there are fewer key-value heads than ranks, they are copied, so that every rank has the key-value head of its
    query heads.
    """
    copies = max(1, over.size // key.shape[1])
    laid = [query, *(part.repeat_interleave(copies, dim=1) if copies > 1 else part for part in (key, value))]
    parts = [part[0].transpose(0, 1).unflatten(1, (over.size, -1)) for part in laid]
    mine = torch.cat(parts, dim=2).transpose(0, 1).contiguous()
    row = all_to_all(mine, over.name).flatten(0, 1)
    return [part.transpose(0, 1)[None] for part in row.split([part.shape[2] for part in parts], dim=1)]


def split_tokens(out: Tensor, over: SequenceGroup) -> Tensor:
    """Convert outputs [1, T, heads / P, D] (this rank's heads) to [1, T / P, heads, D] (its tokens, all heads)."""
    shares = out[0].unflatten(0, (over.size, -1)).contiguous()
    return all_to_all(shares, over.name).transpose(0, 1).flatten(1, 2)[None]


def gather_values(values: Sequence[Tensor], counts: Sequence[int], over: SequenceGroup) -> tuple[Tensor, ...]:
    """Gather fp32 values [K] of each rank into [S] on every rank, where K is the rank's entry in `counts`.
    Differentiable.

    Every rank then computes the same loss, and receives the gradient of its own values.
    """
    if not sum(counts):
        return tuple(values)
    return _Gather.apply(list(counts), over, *values)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, counts: list[int], over: SequenceGroup, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.start, ctx.end = sum(counts[: over.rank]), sum(counts[: over.rank + 1])
        # If no loss uses an output, its gradient is None instead of zeros, which saves computation.
        ctx.set_materialize_grads(False)
        mine = torch.zeros(len(values), max(counts), dtype=torch.float32, device=values[0].device)
        for row, part in zip(mine, values, strict=True):
            row[: len(part)] = part
        every = [torch.empty_like(mine) for _ in counts]
        torch.distributed.all_gather(every, mine, group=over.process_group)
        return tuple(
            torch.cat([part[row, :count] for part, count in zip(every, counts, strict=True)])
            for row in range(len(values))
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None | Tensor, ...]:
        return None, None, *(None if grad is None else grad[ctx.start : ctx.end].contiguous() for grad in grads)
