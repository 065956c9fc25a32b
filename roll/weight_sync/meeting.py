"""Members of a process group on several hosts check that they reach each other before gloo or NCCL connects them.

If gloo or NCCL cannot connect two members, both wait for the other until the deadline, and neither says which address
it tried. So each member listens where the library will listen, and each connects to one member of every other host.
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
"""Seconds between two requests of a member that waits for the others, for each member: the store answers one by one."""
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
        where = f"{place.address}|{place.interface}|{port}" if place else ""
        said = _exchange(store, rank, size, "here", where, seconds, stopped)
        if place is not None:
            problems = _exchange(store, rank, size, "reached", _unreached(rank, said), seconds, stopped)
            if first := next(filter(None, problems), None):
                _wait_for_readers(store, rank, size)
                raise HostUnreachable(first)


def _wait_for_readers(store: Any, rank: int, size: int) -> None:
    """Keep the store of rank 0, which ends with its process, until all members know the problem."""
    store.set(_named("told", rank), "")
    until = time.monotonic() + CONNECT_SECONDS
    while rank == 0 and absent(store, range(size), "told") and time.monotonic() < until:
        time.sleep(LOOK_EVERY)


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


def _unreached(rank: int, said: Sequence[str]) -> str:
    """Return why a member on another host cannot be reached, with both ends and the keys; empty if all can be, or if
    another member of this host tries.
    """
    members = [_member(each) for each in said]
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


def _exchange(
    store: Any, rank: int, size: int, key: str, own: str, seconds: float, stopped: Callable[[], None]
) -> list[str]:
    """Say a line of text to all members, and return what each said. Rank 0 collects, so that others read one key."""
    store.set(_named(key, rank), own)
    end, missing = time.monotonic() + seconds, list(range(size))
    pause = max(LOOK_EVERY, size * MEMBER_SECONDS)
    while not store.check([f"all {key}"]):
        if rank == 0 and not (missing := absent(store, missing, key)):
            said = [store.get(_named(key, member)).decode() for member in range(size)]
            store.set(f"all {key}", "\n".join(said))
            return said
        stopped()
        if time.monotonic() > end:
            raise TimeoutError(f"timed out: member(s) {ranges(absent(store, missing, key))} did not join")
        time.sleep(pause)
    return store.get(f"all {key}").decode().split("\n")


def absent(store: Any, members: Sequence[int], key: str = "here") -> list[int]:
    """Return the members that have not set their key. Takes a single request if all have."""
    if store.check([_named(key, member) for member in members]):
        return []
    if len(members) == 1:
        return list(members)
    middle = len(members) // 2
    return absent(store, members[:middle], key) + absent(store, members[middle:], key)


def _named(key: str, member: int) -> str:
    return f"{key} {member}"
