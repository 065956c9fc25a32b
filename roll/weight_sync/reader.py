"""Reads the buckets of a weight sync in one worker of an engine, with any transport."""

from __future__ import annotations

import torch
from torch import Tensor

from roll.weight_sync.bucket import Bucket, read_bucket
from roll.weight_sync.device import Broadcast, DeviceBucket, layout, open_shared, verified_tensors
from roll.weight_sync.routes import Rendezvous, Route, Transport


class BucketReader:
    """Reads the buckets sent to one worker of an engine."""

    def __init__(self, route: Route, rendezvous: Rendezvous | None, worker: int, device: torch.device) -> None:
        """Open the route. On a broadcast route, wait for the other members. `worker` is the index of the device in its
        engine.
        """
        self._device, self._broadcast = device, None
        if route.transport is Transport.BROADCAST:
            assert rendezvous is not None
            self._broadcast = Broadcast(rendezvous, route.first_rank + worker, device)

    def read(self, bucket: Bucket | DeviceBucket) -> dict[str, Tensor]:
        """Return the tensors of a bucket. They are valid until the next call.

        Raises:
            WeightSyncError: the received data does not match what was sent.
        """
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
