"""The role that generates: engines that share the load, as the scheduler sees them, and one by one, as the weight sync does."""

from __future__ import annotations

from collections.abc import Sequence

from roll.strategies.base import EngineActivity, GenerateStrategy
from roll.types import Completion, Ints, Sampling
from roll.weight_sync.bucket import Adapter, Bucket
from roll.weight_sync.device import DeviceBucket
from roll.weight_sync.routes import Rendezvous, Route
from roll.workers.device_sharing import Level
from roll.workers.group import LOOK_SECONDS, WorkerGroup


class ActorInfer:
    """Facade of the `actor_infer` group."""

    def __init__(self, group: WorkerGroup[GenerateStrategy], rollout_seconds: float, sync_seconds: float) -> None:
        self._group = group
        self._rollout_seconds, self._sync_seconds = rollout_seconds, sync_seconds
        self._tokens_in_flight = [0] * len(group)

    async def generate(self, token_ids: Ints, sampling: Sampling, seed: int | None = None) -> Sequence[Completion]:
        """Samples of one prompt, from the engine with the fewest tokens in flight."""
        engine = min(range(len(self._group)), key=lambda rank: self._tokens_in_flight[rank])
        cost = sampling.samples * (len(token_ids) + sampling.max_new_tokens)
        self._tokens_in_flight[engine] += cost
        try:
            calls = self._group.batched.within(self._rollout_seconds)
            return await calls.one(engine, GenerateStrategy.generate, token_ids, sampling, seed)
        finally:
            self._tokens_in_flight[engine] -= cost

    async def pause(self) -> None:
        """Stop all engines amid their responses, until the next sync; see `GenerateStrategy.pause`."""
        await self._group.within(self._sync_seconds).all(GenerateStrategy.pause)

    @property
    def engines(self) -> list[SyncedEngine]:
        """Each engine, as the weight sync addresses it."""
        return [SyncedEngine(self._group, number, self._sync_seconds) for number in range(len(self._group))]

    async def activity(self) -> list[EngineActivity]:
        """What each engine did since the last call."""
        return await self._group.within(LOOK_SECONDS).all(GenerateStrategy.activity)

    async def offload(self, discard: bool) -> int | None:
        """See `ColocatedRole`."""
        await self._group.within(self._sync_seconds).all(GenerateStrategy.offload, discard)
        return await self._group.held_bytes()

    async def onload(self, level: Level) -> None:
        """See `ColocatedRole`."""
        await self._group.within(self._sync_seconds).all(GenerateStrategy.onload, level is Level.WHOLE)


class SyncedEngine:
    """Implements `roll.weight_sync.sync.Engine`: one rank of the group."""

    def __init__(self, group: WorkerGroup[GenerateStrategy], number: int, seconds: float) -> None:
        self._calls, self._number = group.within(seconds), number
        self.name = f"{group.role} rank {number}"

    async def pause(self) -> None:
        """See `Engine`."""
        await self._calls.one(self._number, GenerateStrategy.pause)

    async def open_route(self, route: Route, rendezvous: Rendezvous | None) -> None:
        """See `Engine`."""
        await self._calls.one(self._number, GenerateStrategy.open_route, route, rendezvous)

    async def load_bucket(self, bucket: Bucket | DeviceBucket) -> None:
        """See `Engine`."""
        await self._calls.one(self._number, GenerateStrategy.load_bucket, bucket)

    async def load_adapter(self, adapter: Adapter) -> None:
        """See `Engine`."""
        await self._calls.one(self._number, GenerateStrategy.load_adapter, adapter)

    async def resume(self, policy_version: int) -> None:
        """See `Engine`."""
        await self._calls.one(self._number, GenerateStrategy.resume, policy_version)

    async def policy_version(self) -> int:
        """See `Engine`."""
        return await self._calls.one(self._number, GenerateStrategy.policy_version)
