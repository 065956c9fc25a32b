"""The weight sync of a run whose engines may die.

an engine dies        it is left out until its restart is done
it is back            the next sync brings it all weights
none serves any more  and samples wait: the sync comes at once, the trainer has nothing else to do
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from roll.pipeline.device_phases import DevicePhases
from roll.weight_sync.sync import WeightSync
from roll.workers.actor_infer import ActorInfer

T = TypeVar("T")


class EngineSync:
    """Sends the trainer's weights to the live engines."""

    def __init__(
        self, sync: WeightSync, engines: ActorInfer, phases: DevicePhases, in_hands: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """`in_hands` is a context that is held while engines have parts of two models."""
        self._sync, self._engines, self._pool, self._phases = sync, engines, engines.pool, phases
        self._in_hands, self._version = in_hands, 0

    async def push(self, policy_version: int) -> None:
        """Make every engine that is there generate with the trainer's present weights; at least one.

        Raises:
            RollError: as `WeightSync.push`; or why no engine will come back.
        """
        self._version, took = policy_version, []
        while not took:
            await self._wait_for_one()
            with self._in_hands(), self._pool.in_sync():
                self._sync.choose(self._pool.present)
                took = await self._sync.push(policy_version)
            self._pool.have_weights(took)

    async def _wait_for_one(self) -> None:
        """If no engine is live, offload the trainer until one has started."""
        while not self._pool.present:
            await self._phases.generation()
            await self._pool.until(lambda: bool(self._pool.present))
            await self._phases.training("actor_train")
            await self._phases.sync()

    async def generating(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await work of the engines while the trainer is idle. If no engine serves, the first restarted one gets the weights at once."""
        working = asyncio.ensure_future(work())
        try:
            while True:
                needed = asyncio.ensure_future(self._pool.until(self._is_needed))
                try:
                    await asyncio.wait({working, needed}, return_when=asyncio.FIRST_COMPLETED)
                    if working.done():
                        return working.result()
                    needed.result()
                finally:
                    needed.cancel()
                    await asyncio.gather(needed, return_exceptions=True)
                await self._phases.training("actor_train")
                await self._phases.sync()
                await self.push(self._version)
                await self._phases.generation()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    def _is_needed(self) -> bool:
        return self._engines.waits and not self._pool.serving and bool(self._pool.stale)
