"""Reads the buckets of a sync in one worker of an engine, by any transport."""

from __future__ import annotations

import torch
from torch import Tensor

from roll.weight_sync.bucket import Bucket, read_bucket
from roll.weight_sync.device import Broadcast, DeviceBucket, checked, layout, open_shared
from roll.weight_sync.routes import Rendezvous, Route, Transport


class BucketReader:
    """Reads the buckets that are sent to one worker of an engine."""

    def __init__(self, route: Route, rendezvous: Rendezvous | None, worker: int, device: torch.device) -> None:
        """`worker` is the index of the worker's device in its engine. Waits for the other members of a broadcast."""
        self._device, self._broadcast = device, None
        if route.transport is Transport.BROADCAST:
            assert rendezvous is not None
            self._broadcast = Broadcast(rendezvous, route.first_rank + worker, device)

    def read(self, bucket: Bucket | DeviceBucket) -> dict[str, Tensor]:
        """Return the bucket's tensors, which are valid until the next read.

        Raises:
            WeightSyncError: what arrived is not what was sent.
        """
        if isinstance(bucket, Bucket):
            return read_bucket(bucket)
        if self._broadcast is None:
            return checked(open_shared(bucket, self._device), bucket)
        buffer = torch.empty(layout(bucket.tensors)[1], dtype=torch.uint8, device=self._device)
        self._broadcast.start(buffer).wait()
        return checked(buffer, bucket)

    def close(self) -> None:
        """Leave the broadcasts."""
        if self._broadcast is not None:
            self._broadcast.close()
            self._broadcast = None
