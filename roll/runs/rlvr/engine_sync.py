"""Weight sync for a run in which engines may die.

A dead engine is left out until it has restarted. The next sync sends all weights to a restarted engine. If samples are
waiting and no engine serves any more, the sync takes place as soon as an engine has restarted, because the trainer is
idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from typing import Protocol

from roll.engines.actor_infer import ActorInfer
from roll.runs.device_phases import DevicePhases
from roll.system.event_loop import guarded
from roll.weight_sync.sync import WeightSync


class Engines(Protocol):
    """What the loop asks of the engines."""

    async def push(self, policy_version: int) -> None:
        """Send the trainer's weights to the engines. Raises RollError if that fails."""
        ...

    def generating(self) -> AbstractAsyncContextManager[None]:
        """A context of generation while the trainer is idle. Raises RollError if no engine will serve again."""
        ...


class EngineSync:
    """Sends the trainer's weights to the live engines."""

    def __init__(
        self,
        sync: WeightSync,
        engines: ActorInfer,
        phases: DevicePhases,
        in_hands: Callable[[Callable[[], Awaitable[bool]]], AbstractContextManager[None]],
    ) -> None:
        """`in_hands` returns a context held while engines may have a mixture of weights. It is given `abandon`."""
        self._sync, self._engines, self._pool, self._phases = sync, engines, engines.pool, phases
        self._in_hands, self._version = in_hands, 0
        self._syncing = asyncio.Lock()

    async def open_routes(self) -> None:
        """Open the routes of the weight sync; see `WeightSync.open_routes`."""
        with self._in_hands(self.abandon):
            await self._sync.open_routes()

    async def push(self, policy_version: int) -> None:
        """Send the trainer's current weights to every live engine. Without one, wait until an engine has restarted.

        Raises:
            RollError: the sync failed (see `WeightSync.push`), or no engine will serve again.
        """
        self._version, took = policy_version, []
        while not took:
            await self._wait_for_one()
            with self._in_hands(self.abandon), self._pool.in_sync():
                self._sync.choose(self._pool.present)
                took = await self._sync.push(policy_version)
            self._pool.have_weights(took)

    async def abandon(self) -> bool:
        """Make the engines ready for another sync, after one that the trainer could not complete.

        Return False if they must restart, because they may wait for the trainer in a broadcast without a deadline.
        """
        if self._sync.broadcasts:
            return False
        await self._engines.abandon_update()
        return True

    async def _wait_for_one(self) -> None:
        """While no engine is live, offload the trainer and wait for one to restart."""
        while not self._pool.present:
            await self._phases.generation()
            await self._pool.until(lambda: bool(self._pool.present))
            await self._phases.training("actor_train")
            await self._phases.sync()

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """A context of generation while the trainer is idle. If no engine serves, sync the first restarted at once.

        Raises:
            RollError: such a sync failed, or no engine will serve again. The block is cancelled.
        """
        async with guarded(self._sync_when_needed()):
            yield
            async with self._syncing:
                pass  # a sync in progress must not be cancelled

    async def _sync_when_needed(self) -> None:
        while True:
            await self._pool.until(self._is_needed)
            async with self._syncing:
                await self._phases.training("actor_train")
                await self._phases.sync()
                await self.push(self._version)
                await self._phases.generation()

    def _is_needed(self) -> bool:
        return self._engines.waits and not self._pool.serving and bool(self._pool.stale)
