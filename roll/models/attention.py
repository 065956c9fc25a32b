"""Attention over packed sequences through transformers' attention interface.

The model is given `cu_seq_lens_q` and `max_length_q` as keyword arguments; no token attends to another sequence.
On CUDA the kernel is torch's variable-length FlashAttention, which takes bf16 and fp16. On the CPU, and in fp32,
the rows are laid side by side for the length of one kernel call: with causal attention a right-padded row needs no
mask, and short sequences cost what they are, not the square of the micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from roll.models.sequence_parallel import over_ranks

PACKED = "roll_packed"


def register() -> str:
    """Register the packed kernel in transformers. Return the name for `attn_implementation`."""
    AttentionInterface.register(PACKED, over_ranks(packed_attention))
    return PACKED


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence.

    Args:
        query: [1, heads, T, D].
        key, value: [1, key-value heads, T, D].
        cu_seq_lens_q: int32 [N + 1], where each sequence starts and the last one ends.
        max_length_q: tokens of the longest sequence.

    Returns:
        [1, T, heads, D] and None (no attention weights).
    """
    if sliding_window is not None and max_length_q > sliding_window:
        raise ValueError(f"sequences of {max_length_q} tokens exceed the model's sliding window of {sliding_window}: not supported")
    if query.is_cuda and query.dtype != torch.float32:
        q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
        offsets, longest = cu_seq_lens_q, max_length_q
        out = varlen_attn(q, k, v, offsets, offsets, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=True)
        assert isinstance(out, Tensor)
        return out[None], None
    rows, columns = positions(cu_seq_lens_q, query.shape[2])
    count = len(cu_seq_lens_q) - 1

    def side_by_side(packed: Tensor) -> Tensor:
        heads, _, width = packed.shape[1:]
        laid = packed.new_zeros(count, max_length_q, heads, width)
        laid[rows, columns] = packed[0].transpose(0, 1)
        return laid.transpose(1, 2)

    out = nn.functional.scaled_dot_product_attention(
        side_by_side(query), side_by_side(key), side_by_side(value), is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2)[rows, columns][None], None


def positions(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the sequence index and the position within the sequence, both [T], of every packed token."""
    lengths = offsets.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths, output_size=tokens)
    columns = torch.arange(tokens, device=offsets.device) - offsets[:-1][rows]
    return rows, columns
