"""The engine's end of a sync: one worker's buckets, by whatever way they come."""

from __future__ import annotations

import torch
from torch import Tensor

from roll.weight_sync.bucket import Bucket, read_bucket
from roll.weight_sync.device import Broadcast, DeviceBucket, borrow, checked, layout
from roll.weight_sync.routes import Meeting, Route, Way


class BucketReader:
    """Reads the buckets that are sent to one worker of an engine."""

    def __init__(self, route: Route, meeting: Meeting | None, worker: int, device: torch.device) -> None:
        """`worker` counts the engine's devices. On the way of broadcasts this waits for the others to come."""
        self._device, self._broadcast = device, None
        if route.way is Way.BROADCAST:
            assert meeting is not None
            self._broadcast = Broadcast(meeting, route.first_rank + worker, device)

    def read(self, bucket: Bucket | DeviceBucket) -> dict[str, Tensor]:
        """The bucket's tensors, which are the caller's to keep until the next read.

        Raises:
            WeightSyncError: what arrived is not what was sent.
        """
        if isinstance(bucket, Bucket):
            return read_bucket(bucket)
        if self._broadcast is None:
            return checked(borrow(bucket, self._device), bucket)
        buffer = torch.empty(layout(bucket.tensors)[1], dtype=torch.uint8, device=self._device)
        self._broadcast.start(buffer).wait()
        return checked(buffer, bucket)

    def close(self) -> None:
        """Leave the broadcasts."""
        if self._broadcast is not None:
            self._broadcast.close()
            self._broadcast = None
