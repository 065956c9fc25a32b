"""Frees GPU memory temporarily: empties the storages of tensors, and later refills them in place.

Storages are emptied but never replaced, so all tensors that share a storage have their values again afterwards: ZeRO's
flat buffers and their views, optimizer states and parameters. PyTorch's FSDP frees gathered parameters in the same way.
DeepSpeed's own `offload_states` replaces buffers instead. In DeepSpeed 0.19.8 it supports only ZeRO-1 to 3, under
ZeRO-3 only its own FusedAdam, and no frozen parameters, such as the base model of a LoRA adapter.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

PIECE = 256 << 20
"""Bytes of one host buffer. PyTorch rounds pinned ones up to a power of two: small pieces waste less."""


class Offload:
    """Moves the values of a process's tensors between device and host memory."""

    def __init__(self, device: str, constant: bool = False) -> None:
        """If the values are `constant`, they are copied to the host only once."""
        self._device, self._constant = device, constant
        self._copies: list[tuple[UntypedStorage, list[Tensor]]] = []
        self._spare: dict[int, list[Tensor]] = defaultdict(list)
        self._is_away = False

    @torch.no_grad()
    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors' storages from the device to the host, and free their device memory. Idempotent."""
        if self._is_away:
            return
        self._wait()
        if not (self._constant and self._copies):
            self._copies = [(storage, self._copy(storage)) for storage in storages(tensors, self._device)]
            self._spare.clear()
            self._wait()
        for storage, _ in self._copies:
            storage.resize_(0)
        if self._device == "cuda":
            torch.cuda.empty_cache()
        self._is_away = True

    @torch.no_grad()
    def onload(self) -> None:
        """Copy all values back to the device. Idempotent."""
        if not self._is_away:
            return
        for storage, pieces in self._copies:
            storage.resize_(sum(len(piece) for piece in pieces))
            for part, piece in zip(_flat(storage).split(PIECE), pieces, strict=True):
                part.copy_(piece, non_blocking=True)
        self._wait()
        if not self._constant:
            for _, pieces in self._copies:
                for piece in pieces:
                    self._spare[len(piece)].append(piece)
            self._copies = []
        self._is_away = False

    def _copy(self, storage: UntypedStorage) -> list[Tensor]:
        pieces = []
        for part in _flat(storage).split(PIECE):
            spare = self._spare[len(part)]
            piece = (
                spare.pop() if spare else torch.empty(len(part), dtype=torch.uint8, pin_memory=self._device == "cuda")
            )
            pieces.append(piece.copy_(part, non_blocking=True))
        return pieces

    def _wait(self) -> None:
        """Wait for all streams of the device, because backends communicate on separate streams."""
        if self._device == "cuda":
            torch.cuda.synchronize()


def storages(tensors: Iterable[Tensor], device: str) -> list[UntypedStorage]:
    """Return each storage on the device once, except another process's or a file's: they cannot be emptied."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type == device and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.resizable():
                found[storage.data_ptr()] = storage
    return list(found.values())


def tensors_in(*roots: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested containers, with their gradients and attributes, such as ZeRO's partitions."""
    seen: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen[id(found)] = found
        if isinstance(found, Tensor):
            yield found
            waiting += vars(found).values()
            if found.is_leaf:
                waiting.append(found.grad)
        elif isinstance(found, Mapping):
            waiting += [*found.keys(), *found.values()]
        elif isinstance(found, (list, tuple, set, deque)):
            waiting += found
        elif is_dataclass(found) and not isinstance(found, type):
            waiting += vars(found).values()


def _flat(storage: UntypedStorage) -> Tensor:
    """Return a uint8 tensor over all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
