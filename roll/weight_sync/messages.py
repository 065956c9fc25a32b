"""The messages of a weight sync to vLLM, as plain values: vLLM sends them to its workers, and a server gets JSON.

`roll/weight_sync/vllm_plugin.py` reads them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from roll.weight_sync.bucket import Bucket
from roll.weight_sync.device import DeviceBucket
from roll.weight_sync.routes import Rendezvous, Route


def route_as_plain(route: Route, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """Return the route and the rendezvous as arguments of `RouteOpened`."""
    return {
        "route": asdict(route) | {"transport": route.transport.value},
        "rendezvous": None if rendezvous is None else asdict(rendezvous),
    }


def bucket_as_plain(bucket: Bucket | DeviceBucket) -> dict[str, Any]:
    """Return the bucket as arguments of `BucketArrived`."""
    specs = [[tensor.name, tensor.dtype, list(tensor.shape), tensor.nbytes] for tensor in bucket.tensors]
    in_file = isinstance(bucket, Bucket)
    return {
        "tensors": specs,
        "checksum": bucket.checksum,
        "path": bucket.path if in_file else None,
        "handles": {} if in_file else dict(bucket.handles),
    }


ABANDONED: dict[str, Any] = {"tensors": [], "checksum": "", "path": None, "handles": {}, "abandons": True}
"""Arguments of the `BucketArrived` that lets an incomplete update end."""
