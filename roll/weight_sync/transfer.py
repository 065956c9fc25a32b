"""Both ends of a weight sync: the ranks of the trainer that fill buckets with gathered weights, and the workers of the
engines that read them, with any transport.

Methods that gather are collective: every rank of the trainer must call them with the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from roll.types import TensorSpec
from roll.weight_sync.bucket import Adapter, Bucket, read_bucket, write_adapter, write_bucket
from roll.weight_sync.device import Broadcast, DeviceBucket, DeviceSender, layout, open_shared, verified_tensors
from roll.weight_sync.routes import Rendezvous, Route, Transport


class Weights(Protocol):
    """The part of the training strategy that a sync uses."""

    def tensors(self, adapter: bool) -> list[TensorSpec]:
        """See `TrainStrategy`."""
        ...

    def gathered(self, names: Sequence[str], adapter: bool) -> AbstractContextManager[Mapping[str, Tensor]]:
        """See `TrainStrategy`."""
        ...

    def adapter_config(self) -> str:
        """See `TrainStrategy`."""
        ...


class BucketSender:
    """Sends weights from one rank of the trainer, through files, shared buffers and broadcasts."""

    def __init__(self, weights: Weights, rank: int, device: torch.device) -> None:
        self._weights, self._rank = weights, rank
        self._buffers = DeviceSender(device)

    def tensors(self) -> list[TensorSpec]:
        """Return the specifications of all tensors of the model."""
        return self._weights.tensors(adapter=False)

    def write_bucket(self, names: Sequence[str], path: Path) -> Bucket | None:
        """Gather some of the model's tensors over all ranks. Rank 0 writes and describes a file; others return None."""
        with self._weights.gathered(names, adapter=False) as tensors:
            return write_bucket(path, tensors) if self._rank == 0 else None

    def write_adapter(self, folder: Path | None) -> Adapter | None:
        """Gather the adapter and return it on rank 0: as a PEFT folder or, with `folder` None, its content."""
        with self._weights.gathered(
            [tensor.name for tensor in self._weights.tensors(adapter=True)], adapter=True
        ) as tensors:
            return write_adapter(folder, self._weights.adapter_config(), tensors) if self._rank == 0 else None

    def join_broadcast(self, rendezvous: Rendezvous | None) -> None:
        """Leave the previous broadcast group, if any, and join a new one if `rendezvous` is given. Called on rank 0
        only.

        From then on, `fill_bucket` broadcasts its buckets to the new group.
        """
        self._buffers.close()
        if rendezvous is not None:
            self._buffers.join(rendezvous)

    def fill_bucket(self, names: Sequence[str], slot: int, openers: int) -> DeviceBucket:
        """Gather some of the model's tensors into this rank's buffer `slot`, and start to broadcast it if there is a
        group.

        `openers` is the number of engines that open the buffer on this rank's device.
        """
        with self._weights.gathered(names, adapter=False) as tensors:
            return self._buffers.fill(tensors, slot, openers)

    def empty_buckets(self) -> None:
        """Wait until all broadcasts started by `fill_bucket` have ended, and free the buffers."""
        self._buffers.empty()

    def close(self) -> None:
        """Leave the broadcast group."""
        self._buffers.close()


class BucketReader:
    """Reads the buckets sent to one worker of an engine."""

    def __init__(self, route: Route, rendezvous: Rendezvous | None, worker: int, device: torch.device) -> None:
        """Open the route. On a broadcast route, wait for the other members. `worker` is the device in its engine."""
        self._device, self._broadcast = device, None
        if route.transport is Transport.BROADCAST:
            assert rendezvous is not None
            self._broadcast = Broadcast(rendezvous, route.first_rank + worker, device)

    def read(self, bucket: Bucket | DeviceBucket) -> dict[str, Tensor]:
        """Return a bucket's tensors, valid until the next call. Raises WeightSyncError if not what was sent."""
        if isinstance(bucket, Bucket):
            return read_bucket(bucket)
        if self._broadcast is None:
            return verified_tensors(open_shared(bucket, self._device), bucket)
        buffer = torch.empty(layout(bucket.tensors)[1], dtype=torch.uint8, device=self._device)
        self._broadcast.start(buffer).wait()
        return verified_tensors(buffer, bucket)

    def close(self) -> None:
        """Leave the broadcast group, if any."""
        if self._broadcast is not None:
            self._broadcast.close()
            self._broadcast = None
