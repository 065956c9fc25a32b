"""Keeps FlashAttention's tile the same for all batches of a batch-invariant engine, which vLLM 0.32 does not.

FlashAttention 3 adds over the keys in tiles. For heads of up to 64 numbers, a tile has 128 keys if some sequence of the
batch has more than a few new tokens, and otherwise 160 or 192 (`hopper/tile_size.h`, by `max_seqlen_q`). So a token's
rounding depended on whether a prompt was processed in the same step. Larger heads have one tile for causal attention
over pages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from torch import Tensor

BACKEND = "vllm.v1.attention.backends.flash_attn"
NAME = "flash_attn_varlen_func"
LARGEST_HEAD = 64
"""Width of the heads for which there are several tiles."""
MANY = 65
"""A number of new tokens of a sequence with which all kernels have the same tile."""


def keep_one_tile() -> None:
    """Replace the kernel of vLLM's backend in this process, if it has one. Idempotent."""
    backend = import_module(BACKEND)
    kernel = getattr(backend, NAME, None)
    if kernel is not None and not hasattr(kernel, "__wrapped__"):
        setattr(backend, NAME, with_one_tile(kernel))


def with_one_tile(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `flash_attn_varlen_func` with a lower bound of `max_seqlen_q`, which is otherwise only a size."""

    @wraps(kernel)
    def attend(*parts: Any, **given: Any) -> Tensor:
        query = parts[0] if parts else given["q"]
        if query.shape[-1] <= LARGEST_HEAD:
            given["max_seqlen_q"] = max(given["max_seqlen_q"], MANY)
        return kernel(*parts, **given)

    return attend
