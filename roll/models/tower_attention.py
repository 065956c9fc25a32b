"""Attention of vision towers that cut pictures into patches (Qwen's), in both directions within each window or picture.

transformers calls such attention once for each window, and a micro-batch of pictures has hundreds. An attention with
`flash` in its name is called once for all of them, with their offsets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from roll.config.derived.model_shape import PATCHED
from roll.models.attention import packed_positions, side_by_side, torch_kernel

NAME = "roll_flash_tower"


def use_tower_attention(model: PreTrainedModel) -> None:
    """Let the tower of a model call `tower_attention`, if it cuts pictures into patches."""
    config: Any = model.config
    if config.model_type in PATCHED:
        AttentionInterface.register(NAME, tower_attention)
        config.vision_config._attn_implementation = NAME


def tower_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention in both directions within each window or picture.

    On CUDA, bf16 and fp16 use torch's variable-length FlashAttention; otherwise each window becomes a padded row.

    Args:
        query, key, value: [1, heads, T, D], of T patches.
        cu_seq_lens_q: int32 [N + 1], start of each window, and the end of the last one.
        max_length_q: Number of patches of the largest window.

    Returns:
        [1, T, heads, D] and None (no attention weights).
    """
    offsets, longest = cu_seq_lens_q, max_length_q
    if query.is_cuda and query.dtype != torch.float32:
        q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
        out = torch_kernel(q, k, v, offsets, offsets, longest, longest, (-1, -1), scale=scaling)
        return out[None], None
    rows, columns = packed_positions(offsets, query.shape[2])
    q, k, v = (side_by_side(part, rows, columns, len(offsets) - 1, longest) for part in (query, key, value))
    seen = torch.arange(longest, device=query.device) < offsets.diff()[:, None]
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None], scale=scaling)
    return out.transpose(1, 2)[rows, columns][None], None
