"""By which way weights reach each engine. Pure functions of the plan.

an engine on the CPU               a file in the host's shared memory
an engine on the trainer's GPUs    the trainer's own buffer, lent by CUDA IPC: no byte leaves the device
an engine on other GPUs            a broadcast from the trainer's rank 0 (NCCL; gloo on the CPU)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from roll.config.derived.placement import RolePlan


class Way(StrEnum):
    """How a bucket gets to an engine."""

    FILE = "file"
    LENT = "lent"
    BROADCAST = "broadcast"


@dataclass(frozen=True)
class Meeting:
    """Where those who take part in broadcasts find each other. The trainer is rank 0."""

    address: str
    port: int
    size: int
    seconds: float
    """Deadline of the meeting and of every broadcast."""


@dataclass(frozen=True)
class Route:
    """The way to one engine."""

    way: Way
    same_host: bool
    """Whether the engine sees the shared memory of the trainer's rank 0."""
    first_rank: int = 0
    """Rank in broadcasts of the engine's first device; the others follow."""


def routes(train: RolePlan, infer: RolePlan, gpus_per_node: int) -> list[Route]:
    """The way to each engine, in rank order. A sound plan has no engine that lies on the trainer's devices in part."""
    if infer.on_cpu:
        return [Route(Way.FILE, True)] * infer.ranks
    home = train.devices[0][0] // gpus_per_node if train.devices[0] else None
    out, rank = [], 1
    for devices in infer.devices:
        same_host = devices[0] // gpus_per_node == home
        if train.all_devices.issuperset(devices):
            out.append(Route(Way.LENT, same_host))
        else:
            out.append(Route(Way.BROADCAST, same_host, rank))
            rank += len(devices)
    return out


def lenders(train: RolePlan, infer: RolePlan, ways: Sequence[Route]) -> list[bool]:
    """By rank of the trainer, whether an engine borrows its buffer."""
    borrowed = {device for devices, route in zip(infer.devices, ways, strict=True) if route.way is Way.LENT for device in devices}
    return [not borrowed.isdisjoint(devices) for devices in train.devices]


def broadcast_size(ways: Sequence[Route], devices_of_an_engine: int) -> int:
    """Members of the broadcast, the trainer included; 0 if no engine needs it."""
    reached = sum(route.way is Way.BROADCAST for route in ways)
    return 1 + reached * devices_of_an_engine if reached else 0
