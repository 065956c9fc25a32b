"""Members of a process group on several hosts check that they reach each other before gloo or NCCL connects them.

If gloo or NCCL cannot connect two members, both wait for the other until the deadline, and neither says which address
it tried. So each member listens where the library will listen, and the first member of each host connects to one of
every other host.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from roll.errors import HostUnreachable
from roll.system.addresses import GLOO, KEYS, NCCL, Place, listening_place, own_interfaces
from roll.system.ranges import ranges
from roll.weight_sync.store import listen_at

LOOK_EVERY = 0.05
"""Seconds between two looks for members that have not come yet."""
MEMBER_SECONDS = 1e-4
"""The same for each member: the store answers their requests one by one."""
CONNECT_SECONDS = 10.0
"""Deadline for one connection between hosts that have both come."""


def meet(
    store: Any, rank: int, size: int, seconds: float, place: Place | None, stopped: Callable[[], None] = lambda: None
) -> None:
    """Wait until all members have come, and check that members on different hosts reach each other.

    Args:
        seconds: deadline for all members to come.
        place: where this member will listen, see `own_place`; None if all members are on one host.
        stopped: is called while members are missing, and may raise.

    Raises:
        TimeoutError: some members did not come.
        HostUnreachable: a member cannot connect to another, or listen at its address.
    """
    with ExitStack() as stack:
        door = None
        if place is not None:
            door = stack.enter_context(_listen(rank, place))
        port = door.getsockname()[1] if door else 0
        where = (place.address, place.interface, str(port)) if place else ()
        store.set(f"here {rank}", "|".join(where))
        _wait(store, rank, "here", size, seconds, stopped)
        if place is None:
            return
        members = [_member(said.decode()) for said in store.multi_get([f"here {other}" for other in range(size)])]
        store.set(f"reached {rank}", _unreached(rank, members))
        _wait(store, rank, "reached", size, seconds, stopped)
        said = [one.decode() for one in store.multi_get([f"reached {other}" for other in range(size)])]
        if problems := [one for one in said if one]:
            raise HostUnreachable(problems[0])


def own_place(on_gpu: bool) -> Place:
    """Return where NCCL (`on_gpu`) or gloo will listen in this process."""
    return listening_place(on_gpu, own_interfaces(), os.environ)


def _listen(rank: int, place: Place) -> socket.socket:
    try:
        return listen_at(place.address, 0)
    except OSError as error:
        raise HostUnreachable(f"rank {rank} cannot listen at {place}: {error.strerror}; set {KEYS}") from error


def _member(said: str) -> tuple[Place, int]:
    address, interface, port = said.split("|")
    return Place(address, interface), int(port)


def _unreached(rank: int, members: Sequence[tuple[Place, int]]) -> str:
    """Return why a member on another host cannot be reached, with both ends and the keys; empty if all can be, or if
    another member of this host tries.
    """
    own, _ = members[rank]
    if any(place.address == own.address for place, _ in members[:rank]):
        return ""  # the first member of this host tries: a door takes few connections at a time
    tried = {own.address}
    for other, (place, port) in enumerate(members):
        if place.address in tried:
            continue
        tried.add(place.address)
        try:
            socket.create_connection((place.address, port), CONNECT_SECONDS, (own.address, 0)).close()
        except OSError as error:
            return _problem(rank, own, other, place, error)
    return ""


def _problem(rank: int, own: Place, other: int, place: Place, error: OSError) -> str:
    why = error.strerror or "no answer"
    return (
        f"rank {rank} at {own} cannot connect to rank {other} at {place}: {why}; set {KEYS} to the interface by which "
        f"the hosts reach each other ({GLOO} on the CPU, {NCCL} on GPUs), and let their firewalls pass all ports"
    )


def _wait(store: Any, rank: int, key: str, size: int, seconds: float, stopped: Callable[[], None]) -> None:
    """Wait until every member has set its key. Rank 0 looks for all of them, and the others for one key of rank 0."""
    all_set, missing = f"all {key}", list(range(size))
    end, pause = time.monotonic() + seconds, max(LOOK_EVERY, size * MEMBER_SECONDS)
    while not store.check([all_set]):
        if rank == 0 and not (missing := absent(store, key, missing)):
            store.set(all_set, "")
            return
        stopped()
        if time.monotonic() > end:
            raise TimeoutError(f"timed out: member(s) {ranges(absent(store, key, missing))} did not join")
        time.sleep(pause)


def absent(store: Any, key: str, members: Sequence[int]) -> list[int]:
    """Return the members that have not set their key. Takes a single request if all have."""
    if store.check([f"{key} {member}" for member in members]):
        return []
    if len(members) == 1:
        return list(members)
    middle = len(members) // 2
    return absent(store, key, members[:middle]) + absent(store, key, members[middle:])
