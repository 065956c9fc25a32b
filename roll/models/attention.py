"""Attention over packed sequences through transformers' attention interface.

The caller passes `cu_seq_lens_q` and `max_length_q` to the model as keyword arguments. Tokens attend only within their
own sequence. On CUDA, bf16 and fp16 use torch's variable-length FlashAttention. On the CPU, and in fp32, the packed row
is unpacked into one padded row per sequence during the kernel call. With causal attention, right padding needs no mask,
and the cost per sequence grows with the square of the longest sequence instead of the square of the micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from roll.models.sequence_parallel import over_ranks

PACKED = "roll_packed"


def register_packed_kernel() -> str:
    """Register the packed kernel in transformers, and return its name for `attn_implementation`."""
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
    """Compute causal attention within each packed sequence.

    Args:
        query: [1, heads, T, D].
        key, value: [1, key-value heads, T, D].
        cu_seq_lens_q: int32 [N + 1], start of each sequence, and the end of the last one.
        max_length_q: Number of tokens of the longest sequence.

    Returns:
        [1, T, heads, D] and None (no attention weights).

    Raises:
        ValueError: a sequence is longer than the model's sliding window.
    """
    if sliding_window is not None and max_length_q > sliding_window:
        problem = f"sequences of {max_length_q} tokens exceed the model's sliding window of {sliding_window}"
        raise ValueError(
            f"{problem}: shorten prompt_length and response_length, or set model_args.attn_implementation to fa2"
        )
    if query.is_cuda and query.dtype != torch.float32:
        q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
        offsets, longest = cu_seq_lens_q, max_length_q
        out = varlen_attn(
            q, k, v, offsets, offsets, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=True
        )
        assert isinstance(out, Tensor)
        return out[None], None
    rows, columns = packed_positions(cu_seq_lens_q, query.shape[2])
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


def packed_positions(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the sequence index and the position within the sequence of every packed token, [T] each."""
    lengths = offsets.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths, output_size=tokens)
    columns = torch.arange(tokens, device=offsets.device) - offsets[:-1][rows]
    return rows, columns
