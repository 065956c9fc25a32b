"""Kernels of optional packages: flash-attn's packed attention and Liger's fused layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from roll.errors import ConfigError, Fault
from roll.models.sequence_parallel import Attention, over_ranks

FLASH = "roll_flash"
FUSED = {"rope": True, "rms_norm": True, "swiglu": True}
PLAIN = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Liger options that stay off, because Liger's losses would replace the head of `models.head`."""


def register_flash() -> str:
    """Register flash-attn's kernel in transformers, and return its name for `attn_implementation`.

    Raises:
        ConfigError: the package is not installed, or was built for another version of torch.
    """
    try:
        kernel = import_module("flash_attn").flash_attn_varlen_func
    except ImportError as error:
        problem = f"fa2, but the package flash-attn cannot be imported: {error}"
        remedy = "install a build of flash-attn for this version of torch, or use auto, which selects torch's own packed kernel"
        raise ConfigError([Fault("model_args.attn_implementation", problem, remedy)]) from error
    AttentionInterface.register(FLASH, over_ranks(flash_attention(kernel)))
    return FLASH


def flash_attention(kernel: Callable[..., Tensor]) -> Attention:
    """Return a function like `models.attention.packed_attention` that calls `kernel` and also supports sliding windows.

    `kernel` is flash-attn's `flash_attn_varlen_func`. It is an argument, because compiled layers cannot import it.
    """

    def attend(
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
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        offsets, longest = cu_seq_lens_q, max_length_q
        out = kernel(q, k, v, offsets, offsets, longest, longest, softmax_scale=scaling, causal=True, window_size=window)
        return out[None], None

    return attend


def apply_liger(model: PreTrainedModel) -> None:
    """Replace norms, MLPs and the rotary embedding of a loaded model with Liger's.

    Raises:
        ConfigError: there is no GPU, the package is not installed, or it does not support the model's type.
    """
    kind = model.config.model_type
    if not torch.cuda.is_available():
        raise _no_liger("there is no GPU, which its kernels need", "remove the key, or run on a GPU")
    if find_spec("liger_kernel") is None:
        raise _no_liger("the package liger-kernel is not installed", "install it, or remove the key")
    apply = getattr(import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{kind}", None)
    if apply is None:
        raise _no_liger(f"liger-kernel does not support models of type {kind}", "remove the key")
    known = inspect.signature(apply).parameters
    apply(model=model, **{name: wish for name, wish in (FUSED | PLAIN).items() if name in known})


def _no_liger(why: str, remedy: str) -> ConfigError:
    return ConfigError([Fault("model_args.liger", f"true, but {why}", remedy)])
