"""Lets roles that share devices take turns: onloads the roles that a piece of work needs, and offloads the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Protocol, TypeVar

T = TypeVar("T")


class Level(IntEnum):
    """The part of a role that is on its devices."""

    AWAY = 0
    """As little as its backend can work with."""
    WEIGHTS = 1
    """The weights, ready to be replaced."""
    WHOLE = 2
    """Everything."""


class ColocatedRole(Protocol):
    """The interface of a role that shares its devices."""

    async def offload(self, discard: bool) -> int | None:
        """Free as much device memory as possible. `discard` says that all weights will be sent again before they are used.

        Returns:
            Bytes that stay, on the device that keeps most; None where the driver does not tell.
        """
        ...

    async def onload(self, level: Level) -> None:
        """Onload the weights, or everything."""
        ...


class DeviceSharing:
    """Tracks which roles are on the devices. Roles that share none are always whole and are never moved.

    It serves one piece of work at a time: the roles of one stay on the devices until the next one asks.
    """

    def __init__(self, shared: Mapping[str, Collection[str]]) -> None:
        """`shared` maps each role that takes turns to the roles that it takes turns with."""
        self._shared = shared
        self._colocated: dict[str, ColocatedRole] = {}
        self._levels: dict[str, Level] = {}
        self.resident: dict[str, int] = {}
        """Bytes of each role that stayed on its devices at the last offload, if known."""

    async def enter(self, role: str, colocated: ColocatedRole) -> None:
        """Note that a role has started and holds all its memory. A role that takes turns is offloaded, so that the next one can start."""
        if role in self._shared:
            self._colocated[role], self._levels[role] = colocated, Level.WHOLE
            await self._offload(role, discard=True)

    async def bring(self, needs: Mapping[str, Level], discard: Collection[str] = ()) -> None:
        """Onload roles to at least these levels. First offload the roles that share devices with them.

        Args:
            discard: roles whose weights, if they are offloaded now, will all be sent again before they are used.

        Raises:
            WorkerFailed: a role could not be offloaded or onloaded, or was late.
        """
        coming = {role: level for role, level in needs.items() if self._levels.get(role, Level.WHOLE) < level}
        others = [role for role, level in self._levels.items() if level > Level.AWAY and role not in needs]
        await together(self._offload(role, role in discard) for role in others if not coming.keys().isdisjoint(self._shared[role]))
        await together(self._onload(role, level) for role, level in coming.items())

    async def make_room(self, starting: Collection[str], discard: Collection[str]) -> None:
        """Prepare the start of roles: offload those that share devices with them, whatever their recorded state.

        `discard` is as in `bring`.
        """
        near = [role for role in self._levels if not set(starting).isdisjoint(self._shared[role])]
        await together(self._offload(role, role in discard) for role in near)

    def ended(self, role: str) -> None:
        """Note that a role's processes have ended and hold no device memory."""
        for known in (self._colocated, self._levels, self.resident):
            known.pop(role, None)

    async def _offload(self, role: str, discard: bool) -> None:
        stayed = await self._colocated[role].offload(discard)
        self._levels[role] = Level.AWAY
        if stayed is not None:
            self.resident[role] = stayed

    async def _onload(self, role: str, level: Level) -> None:
        await self._colocated[role].onload(level)
        self._levels[role] = level


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """Run all concurrently and return the results in order. The first failure cancels the others."""

    async def wait_for(part: Awaitable[T]) -> T:
        return await part

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(wait_for(part)) for part in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in running]


def lines(roles: Sequence[str], shared: Mapping[str, Collection[str]], first: Collection[str]) -> list[list[str]]:
    """Roles in lines: those of a line share devices, directly or by way of others, and stand with `first` in front."""
    waiting, found = list(roles), []
    while waiting:
        line = [waiting.pop(0)]
        for role in line:
            near = [other for other in waiting if other in shared.get(role, ())]
            waiting = [other for other in waiting if other not in near]
            line += near
        found.append(sorted(line, key=lambda role: role not in first))
    return found
