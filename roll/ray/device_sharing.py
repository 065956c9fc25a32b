"""Lets roles that share devices take turns: onloads the roles that the next phase needs, and offloads the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Protocol, TypeVar

T = TypeVar("T")


class Residency(IntEnum):
    """How much of a role is on its devices."""

    AWAY = 0
    """As little as its backend allows."""
    WEIGHTS = 1
    """Only the weights, ready to be replaced."""
    WHOLE = 2
    """Everything."""


class ColocatedRole(Protocol):
    """The interface of a role that shares its devices."""

    async def offload(self, discard: bool) -> int | None:
        """Free as much device memory as possible. With `discard`, the weights need not be kept: they will be sent again
        before their use.

        Returns:
            Remaining bytes on the fullest device; None if the driver does not report them.
        """
        ...

    async def onload(self, level: Residency) -> None:
        """Onload the weights, or everything."""
        ...


class DeviceSharing:
    """Tracks which roles are on the devices. Roles that share no devices are never moved.

    It serves one phase at a time: the roles of a phase stay on the devices until the next phase.
    """

    def __init__(self, shared: Mapping[str, Collection[str]]) -> None:
        """`shared` maps each role that takes turns to the roles with which it takes turns."""
        self._shared = shared
        self._colocated: dict[str, ColocatedRole] = {}
        self._levels: dict[str, Residency] = {}
        self.resident: dict[str, int] = {}
        """Bytes that stayed on the fullest device of each role at its last offload, if known."""

    async def register(self, role: str, colocated: ColocatedRole) -> None:
        """Register a role that has started and holds all its memory. Offload it if it takes turns."""
        if role in self._shared:
            self._colocated[role], self._levels[role] = colocated, Residency.WHOLE
            await self._offload(role, discard=True)

    async def bring(self, needs: Mapping[str, Residency], discard: Collection[str] = ()) -> None:
        """Onload roles to at least the given levels, after offloading the roles that share devices with them.

        Args:
            discard: roles that need not keep their weights if they are offloaded now, because these will be sent again
                before their use.

        Raises:
            WorkerFailed: a role could not be offloaded or onloaded, or was late.
        """
        coming = {role: level for role, level in needs.items() if self._levels.get(role, Residency.WHOLE) < level}
        others = [role for role, level in self._levels.items() if level > Residency.AWAY and role not in needs]
        await run_together(
            self._offload(role, role in discard) for role in others if not coming.keys().isdisjoint(self._shared[role])
        )
        await run_together(self._onload(role, level) for role, level in coming.items())

    async def make_room(self, starting: Collection[str], discard: Collection[str]) -> None:
        """Make room for roles that are about to start: offload the roles that share devices with them, whatever their
        recorded level.

        `discard` is as in `bring`.
        """
        near = [role for role in self._levels if not set(starting).isdisjoint(self._shared[role])]
        await run_together(self._offload(role, role in discard) for role in near)

    def ended(self, role: str) -> None:
        """Note that a role's processes have ended and hold no device memory."""
        for known in (self._colocated, self._levels, self.resident):
            known.pop(role, None)

    async def _offload(self, role: str, discard: bool) -> None:
        stayed = await self._colocated[role].offload(discard)
        self._levels[role] = Residency.AWAY
        if stayed is not None:
            self.resident[role] = stayed

    async def _onload(self, role: str, level: Residency) -> None:
        await self._colocated[role].onload(level)
        self._levels[role] = level


async def run_together(work: Iterable[Awaitable[T]]) -> list[T]:
    """Run awaitables concurrently and return their results in order. The first failure cancels the others."""

    async def wait_for(part: Awaitable[T]) -> T:
        return await part

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(wait_for(part)) for part in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in running]


def lines(
    roles: Sequence[str], shared: Mapping[str, Collection[str]], first: Collection[str], turns: Collection[str]
) -> list[list[list[str]]]:
    """Group roles into lines that start independently. Roles of a line share devices, directly or through others.

    A line is a list of groups that start one after the other: each role in `first` by itself, then each role in `turns`
    by itself, which leaves the devices before the next one, then all others together.
    """
    waiting, found = list(roles), []
    while waiting:
        line = [waiting.pop(0)]
        for role in line:
            near = [other for other in waiting if other in shared.get(role, ())]
            waiting = [other for other in waiting if other not in near]
            line += near
        alone = sorted((role for role in line if role in first or role in turns), key=lambda role: role not in first)
        together = [role for role in line if role not in alone]
        found.append([[role] for role in alone] + [together] * bool(together))
    return found
