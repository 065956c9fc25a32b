"""Sends the trainer's weights to the engines: pause the engines, send, verify, resume.

    trainer   gather 0 | gather 1 | gather 2 | gather 3 |        | free the buckets
    engines   pause    | load 0   | load 1   | load 2   | load 3 | resume

The trainer gathers the first bucket while the engines pause, unless the routes must be opened first, or the bucket
would be broadcast: if an engine died in the pause, the others would wait for it. While the engines load one bucket, the
trainer gathers the next. Two slots alternate, so the buckets never need more memory than two slots. The set of engines
that take part may change between two syncs. Each change starts a new epoch, and the routes are opened again. Each wait
has a deadline, which the group of the awaited workers enforces. An engine that dies during a sync, or misses a
deadline, is left out of the rest of the sync. If it is a member of a broadcast, the broadcast is cut off, so that the
trainer stops waiting for it. All participating engines are then replaced, because none of them has all weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from roll.errors import ECHO_SECONDS, WeightSyncError, WorkerAbandoned, WorkerDied, WorkerLate, WorkerWaited
from roll.types import TensorSpec
from roll.weight_sync.bucket import Adapter, Bucket, plan_buckets
from roll.weight_sync.device import SLOTS, DeviceBucket
from roll.weight_sync.routes import MeetingPoint, Rendezvous, Route, SyncRoutes

T = TypeVar("T")
Sent = Adapter | Bucket | DeviceBucket
LOG = logging.getLogger(__name__)
TRAINER = "actor_train"


class Sender(Protocol):
    """The sync's interface to the trainer."""

    async def meeting_point(self, one_host: bool) -> MeetingPoint:
        """Return where the members of a broadcast meet. `one_host`: all are on the host of the trainer's rank 0."""
        ...

    async def open_routes(self, routes: SyncRoutes, rendezvous: Rendezvous | None) -> None:
        """Prepare to send on these routes only. If there is a rendezvous, wait for the engines to join it."""
        ...

    async def cut_off(self, rendezvous: Rendezvous) -> None:
        """Stop a broadcast that is waiting for a dead member."""
        ...

    async def tensors(self) -> list[TensorSpec]:
        """Return the specifications of all tensors of the model."""
        ...

    async def send_bucket(self, names: Sequence[str], slot: int) -> Bucket | DeviceBucket:
        """Gather some tensors into a slot, and return the bucket. No engine may still be reading the slot."""
        ...

    async def empty_buckets(self) -> None:
        """Free the slots."""
        ...

    async def send_adapter(self) -> Adapter:
        """Gather the adapter and return it."""
        ...


class Engine(Protocol):
    """The sync's interface to one engine. Each call raises `WorkerDied` if the engine has died."""

    @property
    def name(self) -> str:
        """Return the role and the rank, for messages."""
        ...

    async def pause(self) -> None:
        """Stop generating."""
        ...

    async def open_route(self, route: Route, rendezvous: Rendezvous | None) -> None:
        """Prepare for this route only. On a broadcast route, wait for the other members."""
        ...

    async def load_bucket(self, bucket: Bucket | DeviceBucket) -> None:
        """Load one bucket of the weights."""
        ...

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter."""
        ...

    async def resume(self, policy_version: int) -> int:
        """Generate again, with weights of this version. Return the version that the engine then reports."""
        ...

    async def give_up(self, cause: str) -> None:
        """Request the engine's replacement, because it has only a part of the new weights."""
        ...


class BroadcastCutOff(WeightSyncError):
    """A member of a broadcast died while others were waiting for it."""


class DidNotCome(WeightSyncError):
    """Some processes did not join a collective operation in which others were waiting."""

    def __init__(self, late: Sequence[str], waiting: Sequence[str]) -> None:
        super().__init__(
            f"{_few(late)} did not join a collective operation of the weight sync in which {_few(waiting)} waited"
        )
        self.late = late


MOST_NAMED = 8
"""Largest number of processes that a message names."""


def _few(names: Sequence[str]) -> str:
    """Return the names as text, of thousands only the first and the number of the others."""
    others = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {others} others" if others > 0 else "")


class WeightSync:
    """Sends the trainer's weights to the engines, as an adapter or as a whole model."""

    def __init__(
        self,
        sender: Sender,
        engines: Sequence[Engine],
        find_routes: Callable[[Collection[int]], SyncRoutes],
        adapter: bool,
        bucket_bytes: int,
        seconds: float,
    ) -> None:
        """Create a sync in which all engines take part.

        Args:
            sender: The trainer.
            engines: All engines. Their index is their number.
            find_routes: Function that returns the routes to the engines with the given numbers.
            adapter: Whether to send only the adapter instead of the whole model.
            bucket_bytes: Largest size of a bucket, in bytes.
            seconds: Timeout of a broadcast, in seconds.
        """
        self._sender, self._engines, self._find_routes = sender, engines, find_routes
        self._adapter, self._bucket_bytes, self._seconds = adapter, bucket_bytes, seconds
        self._plan: list[tuple[str, ...]] = []
        self._members, self._opened = dict.fromkeys(range(len(engines)), 0), -1
        self._lost: set[int] = set()
        self._rendezvous: Rendezvous | None = None
        self._routes: Mapping[int, Route] = {}
        self.epoch = 0
        """Number of changes to the set of engines that take part. A restart of one of them is a change too."""
        self.versions: dict[int, int | None] = dict.fromkeys(self._members)
        """Version that each engine reported after its last sync. None before its first sync and during a sync."""

    def choose(self, engines: Mapping[int, int]) -> None:
        """Set the engines that take part from the next sync on, with their restarts. Others are left alone."""
        members = dict(sorted(engines.items()))
        assert members and members.keys() <= self.versions.keys(), f"unknown engines in {members}"
        if members != self._members:
            self._members, self.epoch = members, self.epoch + 1

    async def open_routes(self) -> None:
        """Open the routes ahead of the first sync. If an engine dies meanwhile, the next sync opens them.

        Raises:
            WorkerLate: the trainer did not join a broadcast.
        """
        await self._is_whole(self._open_routes())

    async def _open_routes(self) -> None:
        """Make trainer and engines prepare for their routes, once in an epoch. Broadcast members join their group."""
        if self._opened == self.epoch:
            return
        epoch, routes = self.epoch, self._find_routes(self._living)
        self._routes = routes.to
        if self._adapter:
            await self._sender.open_routes(routes, None)
        else:
            rendezvous = self._rendezvous = None
            if routes.broadcast_size:
                one_host = all(route.same_host for route in routes.to.values())
                point = await self._sender.meeting_point(one_host)
                rendezvous = self._rendezvous = Rendezvous(
                    point.address, point.port, routes.broadcast_size, self._seconds, point.file
                )
            opening = self._calls(
                lambda number, engine: engine.open_route(routes.to[number], rendezvous), rendezvous is not None
            )
            await gather_named({TRAINER: self._sender.open_routes(routes, rendezvous)} | opening)
        self._opened = epoch

    async def push(self, policy_version: int) -> list[int]:
        """Send the trainer's current weights to every engine that takes part.

        Returns:
            The numbers of the engines that now have the weights, without those that died during the sync; none if a
                broadcast was cut off.

        Raises:
            WeightSyncError: the received data does not match what was sent, or an engine reports another version after
                the sync.
            WorkerLate: the trainer did not join a broadcast.
        """
        self._lost.clear()
        self.versions |= dict.fromkeys(self._members)
        first = await self._pause()
        if not self._living:
            return []
        self.choose({number: self._members[number] for number in self._living})
        if not await self._is_whole(self._send(first)):
            return []
        reported = await self._resume(policy_version)
        self.versions |= reported
        for number, version in reported.items():
            if version != policy_version:
                raise WeightSyncError(
                    f"{self._engines[number].name} is at policy version {version} after a sync to {policy_version}"
                )
        return list(reported)

    async def _pause(self) -> Sent | None:
        """Pause the engines, and send the adapter or the first bucket meanwhile. Return it, or None if it must be sent
        later, because the routes change.
        """
        pausing = self._calls(lambda _, engine: engine.pause())
        if self._opened != self.epoch or self._rendezvous is not None:
            await gather_named(pausing)
            return None
        sending = asyncio.ensure_future(self._send_first())
        await gather_named({TRAINER: sending} | pausing)
        if not self._lost:
            return sending.result()
        await self._empty()
        return None

    async def _send(self, first: Sent | None) -> None:
        await self._open_routes()
        sent = first or await self._send_first()
        if isinstance(sent, Adapter):
            await gather_named(self._calls(lambda _, engine: engine.load_adapter(sent)))
        else:
            await self._push_model(sent)

    async def _send_first(self) -> Sent:
        if self._adapter:
            return await self._sender.send_adapter()
        self._plan = self._plan or plan_buckets(await self._sender.tensors(), self._bucket_bytes)
        return await self._sender.send_bucket(self._plan[0], 0)

    async def _resume(self, policy_version: int) -> dict[int, int]:
        """Resume the engines, and free the buckets meanwhile. Return the versions that engines report, by number."""
        reported: dict[int, int] = {}

        async def resume(number: int, engine: Engine) -> None:
            reported[number] = await engine.resume(policy_version)

        await gather_named({TRAINER: self._empty()} | self._calls(resume))
        return dict(sorted(reported.items()))

    async def _empty(self) -> None:
        if not self._adapter:
            await self._sender.empty_buckets()

    async def _is_whole(self, work: Awaitable[None]) -> bool:
        """Return whether no broadcast was cut off in this part of a sync. Otherwise, give up the engines."""
        try:
            await work
        except BroadcastCutOff as error:
            await self._give_up_broadcast(str(error))
            return False
        except DidNotCome as error:
            if TRAINER in error.late:
                raise WorkerLate(TRAINER, 0, str(error)) from error
            await self._give_up_broadcast(str(error))
            return False
        return True

    @property
    def broadcasts(self) -> bool:
        """Whether engines may wait for the trainer in a broadcast."""
        return self._rendezvous is not None

    async def _give_up_broadcast(self, cause: str) -> None:
        """Request replacements of engines that wait or have partial weights, and stop the trainer's wait."""
        LOG.warning("%s", cause)
        self._opened = -1
        for number in self._living:
            await self._engines[number].give_up(cause)
        if self._rendezvous is not None:
            await self._sender.cut_off(self._rendezvous)

    @property
    def _living(self) -> list[int]:
        return [number for number in self._members if number not in self._lost]

    def _calls(
        self, ask: Callable[[int, Engine], Awaitable[None]], broadcasts: bool = False
    ) -> dict[str, Awaitable[None]]:
        """Return the calls of `ask` for all participating engines that are alive, by name.

        `broadcasts` specifies whether the engines wait for each other in these calls.
        """
        return {self._engines[number].name: self._unless_it_dies(number, ask, broadcasts) for number in self._living}

    async def _unless_it_dies(
        self, number: int, ask: Callable[[int, Engine], Awaitable[None]], broadcasts: bool
    ) -> None:
        try:
            await ask(number, self._engines[number])
        except (WorkerDied, WorkerLate) as error:
            if isinstance(error, WorkerLate):
                await self._engines[number].give_up(error.cause)
            self._lost.add(number)
            if broadcasts:
                raise BroadcastCutOff(f"a broadcast of weights was cut off: {error}") from error

    async def _push_model(self, sent: Bucket | DeviceBucket) -> None:
        for number, names in enumerate(self._plan[1:], 1):
            sent = await self._send_while_loading(names, number % SLOTS, sent)
            if not self._living:
                return
        await gather_named(self._loading(sent))

    def _loading(self, bucket: Bucket | DeviceBucket) -> dict[str, Awaitable[None]]:
        def load(number: int, engine: Engine) -> Awaitable[None]:
            own = bucket if isinstance(bucket, Bucket) else bucket.for_route(self._routes[number])
            return engine.load_bucket(own)

        return self._calls(load, self._rendezvous is not None)

    async def _send_while_loading(
        self, names: Sequence[str], slot: int, sent: Bucket | DeviceBucket
    ) -> Bucket | DeviceBucket:
        """Send the next bucket while the engines load the previous one."""
        sending = asyncio.ensure_future(self._sender.send_bucket(names, slot))
        await gather_named({TRAINER: sending} | self._loading(sent))
        return sending.result()


async def gather_named(work: Mapping[str, Awaitable[T]]) -> list[T]:
    """Run all tasks concurrently, and return their results in order. The keys are the names of the processes that run
    them.

    After the first failure, the other tasks have `ECHO_SECONDS` to finish or fail, and are then cancelled. If several
    tasks fail, the root cause is raised in preference to its consequences.

    Raises:
        DidNotCome: some processes did not join a collective operation in which all failed processes waited.
    """
    if not work:
        return []
    tasks = {name: asyncio.ensure_future(part) for name, part in work.items()}
    try:
        _, pending = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=ECHO_SECONDS)
        failures = {name: error for name, task in tasks.items() if task.done() and (error := task.exception())}
        late = [name for name, task in tasks.items() if not task.done()]
        if late and all(isinstance(error, WorkerWaited) for error in failures.values()):
            raise DidNotCome(late, list(failures)) from next(iter(failures.values()))
        for error in [
            error for error in failures.values() if not isinstance(error, WorkerAbandoned)
        ] or failures.values():
            raise error
        return [task.result() for task in tasks.values()]
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
