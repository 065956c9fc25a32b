"""Applies a LoRA adapter on the CPU by matrix products.

vLLM's own code for CPUs copies the adapter's matrices once per token, as if each token had another adapter. That takes
more than nine tenths of the time of a small model's forward pass. A training run has one adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class OneAdapterCPU(PunicaWrapperCPU):
    """Applies the adapter that all tokens of a batch share. A batch with several is left to vLLM's code."""

    _slot: int | None = None
    """Index of that adapter in the stacked matrices."""

    def update_metadata(
        self, mapping: LoRAMapping, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **others: Any
    ) -> None:
        """See vLLM's `PunicaWrapperBase`."""
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **others)
        self._slot = shared_slot(mapping.index_mapping, lora_index_to_id)

    def _apply_shrink(self, y: Tensor, x: Tensor, w_t_all: Tensor, scale: float) -> None:
        if self._slot is None:
            super()._apply_shrink(y, x, w_t_all, scale)
        else:
            y.copy_(scale * self._product(x, w_t_all, y))

    def _apply_expand(
        self, y: Tensor, x: Tensor, w_t_all: Tensor, y_offset: int, y_slice_size: int, add_inputs: bool = True
    ) -> None:
        if self._slot is None:
            super()._apply_expand(y, x, w_t_all, y_offset, y_slice_size, add_inputs)
            return
        part, product = y[:, y_offset : y_offset + y_slice_size], self._product(x, w_t_all, y)
        part.copy_(part + product if add_inputs else product)

    def _product(self, x: Tensor, stacked: Tensor, y: Tensor) -> Tensor:
        """Multiply `x`, of shape (tokens, in), by one of the matrices of shape (adapters, 1, out, in)."""
        matrix = stacked[self._slot].squeeze(0)
        return x.to(y.dtype) @ matrix.to(y.dtype).T


def shared_slot(adapters: Sequence[int], slots: Sequence[int | None]) -> int | None:
    """Return the index in `slots` of the adapter of all tokens; None if they differ or a token has none, which is 0."""
    found = set(adapters)
    return slots.index(found.pop()) if len(found) == 1 and 0 not in found else None
