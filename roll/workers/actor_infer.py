"""The role that generates: engines that share the load, as the scheduler sees them, and one by one, as the weight sync does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from roll.errors import RollError
from roll.strategies.base import EngineActivity, GenerateStrategy
from roll.types import Ints, Metrics, NumberedCompletions, Sampling
from roll.weight_sync.bucket import Adapter, Bucket
from roll.weight_sync.device import DeviceBucket
from roll.weight_sync.routes import Rendezvous, Route
from roll.workers.device_sharing import Level
from roll.workers.group import LOOK_SECONDS, WorkerGroup
from roll.workers.running import Running


@dataclass(eq=False)
class _Request:
    """A prompt, some of whose samples may still wait for room."""

    token_ids: Ints
    sampling: Sampling
    seed: int | None
    placed: int = 0
    """Samples that engines have taken."""
    ended: asyncio.Queue[NumberedCompletions | Exception] = field(default_factory=asyncio.Queue)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


@dataclass(eq=False)
class _Share:
    """Samples of a request that one engine draws."""

    request: _Request
    engine: int
    first: int
    """Number of the first of them."""
    left: int
    """How many have not ended."""


class ActorInfer:
    """Facade of the `actor_infer` group."""

    def __init__(self, group: WorkerGroup[GenerateStrategy], running: Running, rollout_seconds: float, sync_seconds: float) -> None:
        self._group, self._running = group, running
        self._rollout_seconds, self._sync_seconds = rollout_seconds, sync_seconds
        self._waiting: deque[_Request] = deque()

    async def generate(self, token_ids: Ints, sampling: Sampling, seed: int | None = None) -> AsyncGenerator[NumberedCompletions, None]:
        """Samples of one prompt, as they end. Those that no engine has room for wait; the first to ask is the first to be served."""
        request = _Request(token_ids, sampling, seed)
        self._waiting.append(request)
        self._place()
        left = sampling.samples
        try:
            while left:
                ended = await request.ended.get()
                if isinstance(ended, Exception):
                    raise ended
                left -= len(ended)
                yield ended
        finally:
            if request.placed < sampling.samples:
                self._waiting.remove(request)
            for task in request.tasks:
                task.cancel()

    def _place(self) -> None:
        """Give engines samples as long as there are some and there is room."""
        while self._waiting:
            request = self._waiting[0]
            engine, count = self._running.place(request.sampling.samples - request.placed)
            if not count:
                return
            share = _Share(request, engine, request.placed, count)
            task = asyncio.create_task(self._run(share))
            task.add_done_callback(partial(self._leave, share))
            request.tasks.append(task)
            request.placed += count
            if request.placed == request.sampling.samples:
                self._waiting.popleft()

    async def _run(self, share: _Share) -> None:
        """Have an engine draw some of a request's samples."""
        request, first = share.request, share.first
        sampling = request.sampling if share.left == request.sampling.samples else replace(request.sampling, samples=share.left)
        seed = None if request.seed is None else request.seed + first
        items = self._group.stream(
            share.engine, GenerateStrategy.generate, request.token_ids, sampling, seed, seconds=self._rollout_seconds
        )
        try:
            async with aclosing(items):
                async for ended in items:
                    self._running.leave(share.engine, len(ended))
                    share.left -= len(ended)
                    request.ended.put_nowait([(first + number, completion) for number, completion in ended] if first else ended)
                    self._place()
                    if not share.left:
                        return
            raise RollError(f"{self._group.role} rank {share.engine} ended without {share.left} of {sampling.samples} samples")
        except Exception as error:
            request.ended.put_nowait(error)

    def _leave(self, share: _Share, task: asyncio.Task[None]) -> None:
        """What was given up makes room as well, also where it was before it began."""
        if share.left:
            self._running.leave(share.engine, share.left)
            self._place()

    async def pause(self) -> None:
        """Stop all engines amid their responses, until the next sync; see `GenerateStrategy.pause`."""
        await self._group.within(self._sync_seconds).all(GenerateStrategy.pause)

    @property
    def engines(self) -> list[SyncedEngine]:
        """Each engine, as the weight sync addresses it."""
        return [SyncedEngine(self._group, number, self._sync_seconds) for number in range(len(self._group))]

    async def activity(self) -> list[EngineActivity]:
        """What each engine did since the last call. How many samples may run adapts to it."""
        activities = await self._group.within(LOOK_SECONDS).all(GenerateStrategy.activity)
        self._running.heed(activities)
        self._place()
        return activities

    def metrics(self) -> Metrics:
        """How many samples may run from now on, where that is bounded, and how many wait for room."""
        waiting = sum(request.sampling.samples - request.placed for request in self._waiting)
        bounds = {} if self._running.limit is None else {"engine/max_running_samples": float(self._running.limit)}
        return bounds | {"engine/queued_samples": float(waiting)}

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
