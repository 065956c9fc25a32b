"""Chooses how the weights are sent to each engine. Pure functions of the placement plan.

an engine on the CPU               a file in the host's shared memory, if all engines are on the trainer's host
an engine on the trainer's GPUs    the trainer's buffer, shared through CUDA IPC, so that no data leaves the GPU
another engine                     a broadcast from the trainer's rank 0 (NCCL; gloo on the CPU)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from roll.config.derived.placement import RolePlan

BACKEND = "roll"
"""Name of roll's plug-in among vLLM's weight-transfer backends."""


class Transport(StrEnum):
    """The way in which a bucket reaches an engine."""

    FILE = "file"
    SHARED = "shared"
    BROADCAST = "broadcast"


@dataclass(frozen=True)
class MeetingPoint:
    """Where the members of a process group find each other: a file if all are on one host, else an address."""

    address: str = ""
    """The only address on which the first member's host listens. Empty if there is a file."""
    port: int = 0
    file: str = ""
    """Path of a new file in a folder of the run that only its user can enter. Empty if there is an address."""


@dataclass(frozen=True)
class Rendezvous:
    """The address or file by which the members of a broadcast meet. The trainer is rank 0."""

    address: str
    port: int
    size: int
    seconds: float
    """Timeout of the rendezvous and of every broadcast, in seconds."""
    file: str = ""
    """See `MeetingPoint`."""

    @property
    def point(self) -> MeetingPoint:
        """Where the members meet."""
        return MeetingPoint(self.address, self.port, self.file)


@dataclass(frozen=True)
class Route:
    """The way in which weights reach one engine."""

    transport: Transport
    same_host: bool
    """Whether the engine is on the host of the trainer's rank 0, so that it can read its shared memory."""
    first_rank: int = 0
    """Rank of the engine's first device in the broadcast group. Its other devices have the ranks that follow."""
    sharers: tuple[int, ...] = ()
    """Ranks of the trainer whose buffers the engine opens, if it shares their devices."""
    turn: int = 0
    """Number of engines before this one that open the same buffers."""


@dataclass(frozen=True)
class SyncRoutes:
    """The ways in which weights reach all engines that take part in syncs."""

    to: Mapping[int, Route]
    openers: Sequence[int]
    """For each rank of the trainer, the number of engines that open its buffer."""
    broadcast_size: int
    """Number of members of the broadcast group, including the trainer; 0 if no engine needs a broadcast."""


def find_routes(
    train: RolePlan, infer: RolePlan, gpus_per_node: int, is_near: Callable[[int], bool], engines: Collection[int]
) -> SyncRoutes:
    """Return the routes to the given engines. Ranks of the broadcast group are contiguous.

    Args:
        is_near: returns whether an engine on the CPU is on the host of the trainer's rank 0 at present.
    """
    to = cpu_routes(engines, is_near) if infer.on_cpu else routes(train, infer, gpus_per_node, engines)
    return SyncRoutes(
        to, count_openers(len(train.devices), to.values()), broadcast_size(to.values(), infer.tensor_parallel)
    )


def cpu_routes(engines: Collection[int], is_near: Callable[[int], bool]) -> dict[int, Route]:
    """Return the routes to engines on the CPU: files if all are on the host of the trainer's rank 0, else a broadcast.

    All engines take the same route, because the trainer writes a bucket either to a file or to the broadcast.
    """
    near = {number for number in engines if is_near(number)}
    if len(near) == len(engines):
        return dict.fromkeys(sorted(engines), Route(Transport.FILE, True))
    return {number: Route(Transport.BROADCAST, number in near, rank) for rank, number in enumerate(sorted(engines), 1)}


def routes(train: RolePlan, infer: RolePlan, gpus_per_node: int, engines: Collection[int]) -> dict[int, Route]:
    """Return the route to each engine, in order. An engine shares all or none of its devices with the trainer."""
    home = train.devices[0][0] // gpus_per_node if train.devices[0] else None
    rank_of = {device: rank for rank, devices in enumerate(train.devices) for device in devices}
    out, rank, before = {}, 1, Counter[tuple[int, ...]]()
    for number in sorted(engines):
        devices = infer.devices[number]
        same_host = devices[0] // gpus_per_node == home
        if all(device in rank_of for device in devices):
            sharers = tuple(sorted({rank_of[device] for device in devices}))
            out[number] = Route(Transport.SHARED, same_host, sharers=sharers, turn=before[sharers])
            before[sharers] += 1
        else:
            out[number] = Route(Transport.BROADCAST, same_host, rank)
            rank += len(devices)
    return out


def count_openers(ranks: int, engine_routes: Iterable[Route]) -> list[int]:
    """Return, for each of the trainer's `ranks`, the number of engines that open its buffer."""
    opened = Counter(rank for route in engine_routes for rank in route.sharers)
    return [opened[rank] for rank in range(ranks)]


def broadcast_size(engine_routes: Iterable[Route], devices_of_an_engine: int) -> int:
    """Return the number of members of the broadcast group, including the trainer; 0 if no engine needs a broadcast."""
    reached = sum(route.transport is Transport.BROADCAST for route in engine_routes)
    return 1 + reached * devices_of_an_engine if reached else 0
