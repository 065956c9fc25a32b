"""The role that generates. The scheduler sees its engines as one pool, the weight sync sees each engine.

If an engine dies, its requests start again on another engine, from the prompt and with the same seeds.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar
from weakref import WeakKeyDictionary

from roll.backend import EngineActivity, GenerateStrategy
from roll.engines.pool import EnginePool, Running
from roll.errors import RollError, WorkerDied, WorkerLate
from roll.ray.device_sharing import Residency, run_together
from roll.ray.group import LOOK_SECONDS, WorkerGroup
from roll.types import AskedPictures, Ints, Metrics, NumberedCompletions, Sampling, Session
from roll.weight_sync.bucket import Adapter, Bucket
from roll.weight_sync.device import DeviceBucket
from roll.weight_sync.routes import Rendezvous, Route

Span = Callable[..., AbstractContextManager[None]]
"""Records what is done within the context that it returns, given the process and a name; see `Trace.span`."""


def unrecorded(process: str, name: str, **facts: object) -> AbstractContextManager[None]:
    """Record nothing."""
    return nullcontext()


ABANDON_SECONDS = 60.0
"""Deadline in seconds for an engine to close an update that the trainer cannot complete. One bucket may be in progress.
"""


@dataclass(eq=False)
class _Request:
    """A request for samples of one prompt. Some of them may still wait for an engine."""

    number: int
    """Position in the order of arrival, starting at 0."""
    token_ids: Ints
    sampling: Sampling
    seed: int | None
    waiting: list[int]
    """Numbers of the samples that are not assigned to an engine, in order."""
    session: Session | None = None
    shown: AskedPictures | None = None
    ended: asyncio.Queue[NumberedCompletions | Exception] = field(default_factory=asyncio.Queue)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    was_late: bool = False


@dataclass(eq=False)
class _Share:
    """Samples of a request that are assigned to one engine."""

    request: _Request
    engine: int
    process: int
    """Number of the engine's process; see `EnginePool.process`."""
    first: int
    """Number of the first sample. The numbers are consecutive."""
    left: set[int]
    """Numbers of the unfinished samples."""


class ActorInfer:
    """Facade of the `actor_infer` group."""

    takes_weights: ClassVar[bool] = True
    """Whether a restarted engine must wait for a weight sync before it accepts requests."""

    def __init__(
        self,
        group: WorkerGroup[GenerateStrategy],
        running: Running,
        rollout_seconds: float,
        sync_seconds: float,
        start_seconds: float,
        answers: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """`answers` waits until the server of an engine answers; see `EnginePool`."""
        self._group, self._running = group, running
        self._rollout_seconds, self._sync_seconds = rollout_seconds, sync_seconds
        self._asked = 0
        self._samples = self._ended_samples = 0  # counted since the engines were last idle
        self._open: set[_Request] = set()
        self._waiting: deque[_Request] = deque()
        self._homes: WeakKeyDictionary[Session, int] = WeakKeyDictionary()  # the engine of each session's last request
        self.span: Span = unrecorded
        """Records each request of an engine."""
        self.pool = EnginePool(group, start_seconds, self.takes_weights, self._engines_changed, answers)

    async def generate(
        self,
        token_ids: Ints,
        sampling: Sampling,
        seed: int | None = None,
        session: Session | None = None,
        shown: AskedPictures | None = None,
    ) -> AsyncGenerator[NumberedCompletions, None]:
        """Yield the samples of one prompt as they finish. Samples wait in order of arrival until an engine has room for
        them.

        Requests of one session go to the same engine, unless it is dead or full.
        """
        request = _Request(self._asked, token_ids, sampling, seed, list(range(sampling.samples)), session, shown)
        self._asked += 1
        if not self._open:
            self._samples = self._ended_samples = 0
        self._samples += sampling.samples
        if self.pool.failure is not None:
            raise self.pool.failure
        self._open.add(request)
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
            self._open.remove(request)
            if request.waiting:
                self._waiting.remove(request)
            for task in request.tasks:
                task.cancel()

    def _engines_changed(self) -> None:
        self._running.serve(self.pool.serving, self.pool.suspect)
        if self.pool.failure is not None:
            for request in self._open:
                request.ended.put_nowait(self.pool.failure)
        self._place()

    def _place(self) -> None:
        """Assign waiting samples to engines while there is room."""
        while self._waiting:
            request = self._waiting[0]
            together = unbroken(request.waiting)
            engine, count = self._running.place(
                len(together), self._homes.get(request.session) if request.session else None
            )
            if not count:
                if not self._running.can_serve:
                    self.pool.wake()  # `waits` may have become true
                return
            if request.session:
                self._homes[request.session] = engine
            share = _Share(request, engine, self.pool.process(engine), together[0], set(together[:count]))
            task = asyncio.create_task(self._recorded(share))
            task.add_done_callback(partial(self._leave, share))
            request.tasks.append(task)
            del request.waiting[:count]
            if not request.waiting:
                self._waiting.popleft()

    async def _recorded(self, share: _Share) -> None:
        request = share.request
        facts = {"request": request.number, "samples": len(share.left), "context": len(request.token_ids)}
        with self.span(f"{self._group.role} rank {share.engine}", "generate", **facts):
            await self._run(share)

    async def _run(self, share: _Share) -> None:
        """Generate some samples of a request on an engine. If it dies or is late once, queue the unfinished ones."""
        request, engine, first, count = share.request, share.engine, share.first, len(share.left)
        sampling = request.sampling if count == request.sampling.samples else replace(request.sampling, samples=count)
        seed = None if request.seed is None else request.seed + first
        items = self._group.callers[engine].stream(
            GenerateStrategy.generate, request.token_ids, sampling, seed, request.shown, seconds=self._rollout_seconds
        )
        try:
            try:
                async with aclosing(items):
                    async for ended in items:
                        numbered = [(first + number, completion) for number, completion in ended] if first else ended
                        self._running.leave(engine, len(ended))
                        self._ended_samples += len(ended)
                        share.left.difference_update(number for number, _ in numbered)
                        self.pool.answered(engine)
                        request.ended.put_nowait(numbered)
                        self._place()
                        if not share.left:
                            return
            except RollError as error:
                raise await self.pool.explained(engine, share.process, error) from error
            left = f"{len(share.left)} of its {count} samples"
            raise RollError(f"{self._group.role} rank {engine} ended a request without {left}")
        except WorkerDied:
            self._requeue(share)
        except WorkerLate as error:
            if request.was_late:
                request.ended.put_nowait(error)
                return
            request.was_late = True
            self.pool.report_late(engine, error)
            self._requeue(share)
        except Exception as error:
            request.ended.put_nowait(error)

    def _requeue(self, share: _Share) -> None:
        """Queue the unfinished samples again."""
        request = share.request
        if not request.waiting:
            insort(self._waiting, request, key=lambda one: one.number)
        request.waiting = sorted({*request.waiting, *share.left})

    def _leave(self, share: _Share, task: asyncio.Task[None]) -> None:
        """Free the room of the samples that a share did not finish, also if it was cancelled before its start."""
        if share.left:
            self._running.leave(share.engine, len(share.left))
            self._place()

    async def pause(self) -> None:
        """Pause all engines in the middle of their responses until the next sync; see `GenerateStrategy.pause`."""
        await self.pool.each(self._sync_seconds, GenerateStrategy.pause)

    async def abandon_update(self) -> None:
        """Make the engines ready for another weight sync, after one that the trainer could not complete.

        An engine that cannot do so within ABANDON_SECONDS is replaced.
        """

        async def ask(engine: int) -> None:
            try:
                await self.pool.one(engine, ABANDON_SECONDS, GenerateStrategy.abandon_update)
            except WorkerDied:
                return  # its death was reported, and it restarts
            except RollError as error:
                self.pool.report_dead(engine, f"its weights cannot be updated any more: {error}")

        await run_together(map(ask, self.pool.present))

    @property
    def waits(self) -> bool:
        """Whether samples wait for an engine."""
        return bool(self._waiting)

    @property
    def progress(self) -> str:
        """The numbers of finished and requested responses since the engines were last idle; empty while idle."""
        return f"{self._ended_samples} of {self._samples} responses" if self._open else ""

    def is_on(self, host: str, engine: int) -> bool:
        """Return whether an engine is on the host with this address at present."""
        return self._group.host(engine) == host

    @property
    def engines(self) -> list[SyncedEngine]:
        """Return the engines as targets of the weight sync."""
        return [
            SyncedEngine(self.pool, self._group.role, number, self._sync_seconds) for number in range(len(self._group))
        ]

    async def activity(self) -> list[EngineActivity]:
        """Return each engine's activity since the last call, zeros if dead. Also adapt the limit of running samples."""
        activities = await self.pool.each(LOOK_SECONDS, GenerateStrategy.activity)
        self._running.adapt(activities)
        self._place()
        return [activities.get(engine, EngineActivity(0.0, 0, 0)) for engine in range(len(self._group))]

    def metrics(self) -> Metrics:
        """Return the numbers of serving engines, restarts and waiting samples, and any limit of running samples."""
        waiting = sum(len(request.waiting) for request in self._waiting)
        bounds = {} if self._running.limit is None else {"engine/max_running_samples": float(self._running.limit)}
        health = {"engine/healthy": float(len(self.pool.serving)), "engine/restarts": float(self.pool.restarts)}
        return bounds | {"engine/queued_samples": float(waiting)} | health

    async def offload(self, discard: bool) -> int | None:
        """See `ColocatedRole`. Waits for restarts in progress first."""
        await self.pool.leave_devices()
        await self.pool.each(self._sync_seconds, GenerateStrategy.offload, discard)
        return await self._group.held_bytes()

    async def onload(self, level: Residency) -> None:
        """See `ColocatedRole`. Dead engines restart once the others are completely onloaded."""
        await self.pool.each(self._sync_seconds, GenerateStrategy.onload, level is Residency.WHOLE)
        if level is Residency.WHOLE:
            self.pool.come_back()

    async def close(self) -> None:
        """Cancel restarts and probes of engines. Call it when no more responses will be requested."""
        await self.pool.close()


class SyncedEngine:
    """Implements `roll.weight_sync.sync.Engine` for one rank of the group."""

    def __init__(self, pool: EnginePool, role: str, number: int, seconds: float) -> None:
        self._pool, self._number, self._seconds = pool, number, seconds
        self.name = f"{role} rank {number}"

    async def pause(self) -> None:
        """See `Engine`."""
        await self._pool.one(self._number, self._seconds, GenerateStrategy.pause)

    async def open_route(self, route: Route, rendezvous: Rendezvous | None) -> None:
        """See `Engine`."""
        await self._pool.one(self._number, self._seconds, GenerateStrategy.open_route, route, rendezvous)

    async def load_bucket(self, bucket: Bucket | DeviceBucket) -> None:
        """See `Engine`."""
        await self._pool.one(self._number, self._seconds, GenerateStrategy.load_bucket, bucket)

    async def load_adapter(self, adapter: Adapter) -> None:
        """See `Engine`."""
        await self._pool.one(self._number, self._seconds, GenerateStrategy.load_adapter, adapter)

    async def resume(self, policy_version: int) -> int:
        """See `Engine`."""
        return await self._pool.one(self._number, self._seconds, GenerateStrategy.resume, policy_version)

    async def give_up(self, cause: str) -> None:
        """See `Engine`."""
        self._pool.report_dead(self._number, cause)


def unbroken(numbers: list[int]) -> list[int]:
    """Return the longest prefix of consecutive numbers."""
    return [number for place, number in enumerate(numbers) if number == numbers[0] + place]
