"""The role that generates, as the scheduler and the weight sync see it: one or more engines that share the load."""

from __future__ import annotations

from collections.abc import Sequence

from roll.strategies.base import GenerateStrategy
from roll.types import Completion, Ints, Sampling
from roll.weight_sync.bucket import Adapter, Bucket
from roll.weight_sync.device import DeviceBucket
from roll.weight_sync.routes import Rendezvous, Route
from roll.workers.device_sharing import Level
from roll.workers.group import WorkerGroup


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
            return await self._group.within(self._rollout_seconds).one(engine, GenerateStrategy.generate, token_ids, sampling, seed)
        finally:
            self._tokens_in_flight[engine] -= cost

    async def pause(self) -> None:
        """Stop producing tokens on every engine."""
        await self._group.within(self._sync_seconds).all(GenerateStrategy.pause)

    async def open_routes(self, engine_routes: Sequence[Route], rendezvous: Rendezvous | None) -> None:
        """Every engine prepares for the route of its weights; those of a broadcast wait for its other members."""
        await self._group.within(self._sync_seconds).each(GenerateStrategy.open_route, [(route, rendezvous) for route in engine_routes])

    async def load_bucket(self, bucket: Bucket | DeviceBucket) -> None:
        """Every engine takes some of the weights."""
        await self._group.within(self._sync_seconds).all(GenerateStrategy.load_bucket, bucket)

    async def load_adapter(self, adapter: Adapter) -> None:
        """Every engine takes the adapter."""
        await self._group.within(self._sync_seconds).all(GenerateStrategy.load_adapter, adapter)

    async def resume(self, policy_version: int) -> None:
        """Every engine produces tokens again, at this version."""
        await self._group.within(self._sync_seconds).all(GenerateStrategy.resume, policy_version)

    async def policy_versions(self) -> list[int]:
        """The version of each engine's weights."""
        return await self._group.within(self._sync_seconds).all(GenerateStrategy.policy_version)

    async def offload(self, discard: bool) -> int | None:
        """See `ColocatedRole`."""
        await self._group.within(self._sync_seconds).all(GenerateStrategy.offload, discard)
        return await self._group.held_bytes()

    async def onload(self, level: Level) -> None:
        """See `ColocatedRole`."""
        await self._group.within(self._sync_seconds).all(GenerateStrategy.onload, level is Level.WHOLE)
