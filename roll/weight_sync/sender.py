"""Makes buckets of gathered weights on each of the trainer's ranks, beside the strategy.

Methods that gather are collective: every rank of the trainer calls them with the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from roll.types import TensorSpec
from roll.weight_sync.bucket import Adapter, Bucket, write_adapter, write_bucket
from roll.weight_sync.device import DeviceBucket, DeviceSender
from roll.weight_sync.routes import Rendezvous


class Weights(Protocol):
    """The part of the training strategy that a sync uses."""

    def tensors(self, adapter: bool) -> list[TensorSpec]:
        """Describe the tensors to send: the adapter's, or the whole model's with any adapter merged in."""
        ...

    def gathered(self, names: Sequence[str], adapter: bool) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Gather whole tensors on every rank while the block lasts."""
        ...

    def adapter_config(self) -> str:
        """Return PEFT's `adapter_config.json`."""
        ...


class BucketSender:
    """Sends the weights of one rank of the trainer: by files, by buffers that engines open, and by broadcasts."""

    def __init__(self, weights: Weights, rank: int, device: torch.device) -> None:
        self._weights, self._rank = weights, rank
        self._buffers = DeviceSender(device)

    def tensors(self) -> list[TensorSpec]:
        """Describe the tensors of the whole model."""
        return self._weights.tensors(adapter=False)

    def write_bucket(self, names: Sequence[str], path: Path) -> Bucket | None:
        """Gather some of the model's tensors over all ranks. Rank 0 writes and describes them; the others return None."""
        with self._weights.gathered(names, adapter=False) as tensors:
            return write_bucket(path, tensors) if self._rank == 0 else None

    def write_adapter(self, folder: Path | None) -> Adapter | None:
        """Gather the adapter. Rank 0 writes a PEFT folder or, without `folder`, returns the adapter's content; the others return None."""
        with self._weights.gathered([tensor.name for tensor in self._weights.tensors(adapter=True)], adapter=True) as tensors:
            return write_adapter(folder, self._weights.adapter_config(), tensors) if self._rank == 0 else None

    def join_broadcast(self, rendezvous: Rendezvous | None) -> None:
        """On rank 0: leave the previous broadcast group, if any, and join the engines on other devices.

        Buckets of `fill_bucket` go to them from then on.
        """
        self._buffers.close()
        if rendezvous is not None:
            self._buffers.join(rendezvous)

    def fill_bucket(self, names: Sequence[str], slot: int, shared: bool) -> DeviceBucket:
        """Gather some of the model's tensors into this rank's buffer `slot`, and start to broadcast it.

        `shared` says that an engine on this rank's device opens the buffer.
        """
        with self._weights.gathered(names, adapter=False) as tensors:
            return self._buffers.fill(tensors, slot, shared)

    def empty_buckets(self) -> None:
        """Wait until all broadcasts of `fill_bucket` have ended, and free its buffers."""
        self._buffers.empty()

    def close(self) -> None:
        """Leave the broadcast group."""
        self._buffers.close()
