"""The processes of one role, which are started, called and ended together. Every wait has a deadline."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, Unpack

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.backend import Rank
from roll.backend_settings import Settings
from roll.errors import (
    ECHO_SECONDS,
    BadInput,
    HostUnreachable,
    RollError,
    WorkerAbandoned,
    WorkerDied,
    WorkerFailed,
    WorkerLate,
    WorkerStopped,
    WorkerWaited,
)
from roll.ray.batching import BatchedCaller, Failure, Paced, Ranks
from roll.ray.device_sharing import run_together
from roll.ray.liveness import WorkerProcess, is_own
from roll.ray.placement import NodePlaces, WorkerPlacement, address_of, is_lost
from roll.ray.process import LONGEST_CAUSE, AsyncProcess, Process, network_notice
from roll.ray.role_signs import RankState, work_of
from roll.system.event_loop import in_own_thread
from roll.system.leftovers import Leftovers
from roll.system.ranges import ranges
from roll.weight_sync.routes import MeetingPoint

S = TypeVar("S", covariant=True)
C = TypeVar("C")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")
LOG = logging.getLogger(__name__)
GRACE = 2.0
"""Time in seconds that child processes have to exit before they are killed."""
LOOK_SECONDS = 60.0
"""Deadline in seconds for a query about a rank's memory or activity."""
LOOK_EVERY = 1.0
"""Seconds between two searches for child processes and files of starting processes."""
TIMEOUTS = ("timed out", "collective operation timeout")
"""Substrings (in lower case) of the error of a rank that waited in a collective operation for missing ranks."""
ECHOES = ("connection closed by peer", "connection reset by peer", "nccl", *TIMEOUTS)
"""Substrings (in lower case) of the error of a rank that failed because another rank had failed."""
LOST = "its host {} is lost"
"""What is said of a rank whose host died, or was not reached for so long that Ray takes it for dead."""
NODE_DIED = re.compile(r"(?:the actor's node was terminated \w+|The actor is not schedulable): (.{1,200})")
"""What Ray says of a dead node in the error of a call, and of a rank that was to start there."""
NOT_REACHED = re.compile(r"is unavailable: (?:The actor is temporarily unavailable: )?(.{1,200}?)\.? The task may")
"""What Ray says of a rank whose connection broke, although it knows of no death: its process may live on."""
NODE_LOOKS, NODE_EVERY = 12, 5.0
"""How often, and every how many seconds, a rank without a living node looks for one before its restart has failed."""
LOG_TAIL = 1 << 20
"""Bytes at the end of a log that are searched for NCCL's watchdog's message, or vLLM's process's exception."""


class WorkerGroup(Ranks[S]):
    """One role's Ray actors, in rank order."""

    device_name: str | None = None
    """Name of rank 0's GPU after the start. None on the CPU, or if a child process uses the GPU."""

    def __init__(
        self,
        role: str,
        placements: Sequence[WorkerPlacement],
        logs: Path,
        record: Path,
        blocking: bool,
        replica_size: int = 1,
        places: NodePlaces | None = None,
    ) -> None:
        """Request the processes from Ray. `blocking`: the methods are no coroutines. Each rank's `Leftovers` file is
        beside `record`. `places`: where a rank is placed whose host is lost; None for nowhere.
        """
        self.role, self.replica_size, self._places = role, replica_size, places
        self._placements, self._logs = (
            list(placements),
            [logs / f"{role}-{rank}.log" for rank in range(len(placements))],
        )
        self._folder = record.parent
        self._records = [record.with_stem(f"{record.stem}-{rank}") for rank in range(len(placements))]
        self._earlier = [0] * len(placements)  # by rank, bytes of the log from earlier processes
        self._kind: Any = Process if blocking else AsyncProcess
        self._actors: list[Any] = [self._new_actor(rank) for rank in range(len(placements))]
        self.callers = [] if blocking else [self._new_caller(rank) for rank in range(len(placements))]
        """By rank, the batched calls on its process. Empty if the methods block."""
        self._pids: dict[int, int] = {}
        self._built: set[int] = set()
        self._started = self._stopped = False
        self._leftovers = [Leftovers(record) for record in self._records]
        self._killed: dict[int, str] = {}  # by rank, why its process was killed
        self._paced = Paced(self)
        self._calls: Counter[str] = Counter()  # unanswered calls by method

    def __len__(self) -> int:
        return len(self._actors)

    def _new_actor(self, rank: int) -> Any:
        placement, log = self._placements[rank], self._logs[rank]
        self._earlier[rank] = log.stat().st_size if log.is_file() else 0
        return self._kind.options(
            runtime_env={"env_vars": placement.environment},
            scheduling_strategy=NodeAffinitySchedulingStrategy(placement.node_id, soft=False)
            if placement.node_id
            else "DEFAULT",
        ).remote(str(log), placement.local_devices)

    def _new_caller(self, rank: int) -> BatchedCaller:
        return BatchedCaller(self._actors[rank], partial(self._reported, rank))

    @contextmanager
    def _reported(self, rank: int, method: str, seconds: float) -> Iterator[None]:
        """Count a call on a rank, and raise its errors like `run`."""
        self._calls[method] += 1
        try:
            yield
        except TimeoutError as error:
            raise self._late(method, seconds, [rank]) from error
        except Exception as error:
            raise self._failure([(rank, error)]) from error
        finally:
            self._calls[method] -= 1

    def preload(self, imports: Callable[[bool], None], after: Sequence[object] = ()) -> list[object]:
        """Let every process import libraries ahead of `start`, which raises the error of an import.

        Args:
            imports: gets whether the process has no GPU.
            after: results of other groups' imports. These come first.

        Returns:
            Ray's references to the results.
        """
        refs = [actor.preload.remote(imports, *after) for actor in self._actors]
        for ref in refs:
            ref.future()  # Reads the result: Ray prints an unread error, as of a process that ends before it is used.
        return refs

    async def start(self, settings: Settings[S], collective_timeout: float, seconds: float) -> None:
        """Build the strategy of every rank. The ranks rendezvous at rank 0's address.

        Raises:
            WorkerFailed: a rank failed or was not ready within `seconds`.
            BadInput: a rank could not use the configured model.
        """
        self._settings, self._collective_timeout = settings, collective_timeout
        everyone = range(len(self))
        await self._warn_of_network(seconds)
        self.device_name = (await self._build(everyone, await self.meeting_point(everyone, seconds), seconds))[0]
        self._started = True
        LOG.info("%s has started, %d rank(s)", self.role, len(self))
        await self._record_processes(everyone)

    async def _warn_of_network(self, seconds: float) -> None:
        """Log what may keep ranks on several hosts from finding each other. Ranks that can be replaced are alone."""
        if not self.callers:
            for host, notice in (await self.ask_hosts(network_notice, seconds=seconds)).items():
                if notice:
                    LOG.warning("%s on %s: %s", self.role, host, notice)

    async def ask_hosts(self, question: Callable[[Unpack[Ts]], R], *arguments: *Ts, seconds: float) -> dict[str, R]:
        """Return what a function says in a process of this role on each host but the driver's, by the host's address.

        Raises:
            WorkerFailed: a process failed or did not answer within `seconds`.
        """
        firsts = {self.host(rank): rank for rank in reversed(range(len(self))) if not self.is_here(rank)}
        asked = [self._actors[rank].ask.remote(question, *arguments) for rank in firsts.values()]
        answers = await self._gather(asked, "ask", seconds, list(firsts.values())) if asked else []
        return dict(zip(firsts, answers, strict=True))

    async def kill_rank(self, rank: int) -> None:
        """Kill one rank's process, so that its unanswered calls fail. `replace` starts another. Idempotent."""
        await self._record_processes([rank])
        ray.kill(self._actors[rank], no_restart=True)

    async def replace(self, rank: int, seconds: float) -> None:
        """Kill one rank's process and its children, and build the same strategy in a new process at the same placement.
        If its host is lost, the process runs on another one; see `NodePlaces`.

        The old process may be dead, stopped or hanging; its unanswered calls fail. Use this only for strategies whose
        ranks are independent: the new process does not rendezvous with other ranks, and objects that `beside` built in
        the old one are lost.

        Raises:
            WorkerFailed, BadInput: as for `start`. The rank may then be replaced again.
            WorkerStopped: the group is stopped, or was meanwhile.
        """
        assert self._started, f"{self.role} is not running"
        self.check_running(rank)
        self._built.discard(rank)
        await self.kill_rank(rank)
        self._pids.pop(rank, None)
        self._killed.pop(rank, None)
        await asyncio.to_thread(self._leftovers[rank].remove, GRACE)
        self._leftovers[rank] = Leftovers(self._records[rank])
        await self._find_node(rank)
        self.check_running(rank)
        self._actors[rank] = self._new_actor(rank)
        if self.callers:
            self.callers[rank] = self._new_caller(rank)
        await self._build([rank], await self.meeting_point([rank], seconds), seconds)
        await self._record_processes([rank])

    def check_running(self, rank: int) -> None:
        """Raise WorkerStopped if the group is stopped: then a failed call of a rank says nothing about its process."""
        if self._stopped:
            raise WorkerStopped(self.role, rank, "its group is stopped")

    async def _find_node(self, rank: int) -> None:
        """Give a rank another node if its own is lost, and wait for one if there is none. Raises WorkerDied."""
        if self._places is None:
            return
        lost = self._placements[rank].node_id
        for _ in range(NODE_LOOKS):
            # In threads, as a question to a head that is lost as well blocks for minutes.
            self._placements[rank] = await in_own_thread(partial(self._places.living, self._placements[rank]))
            if not await in_own_thread(partial(is_lost, node := self._placements[rank].node_id)):
                if node != lost:
                    host, new = address_of(lost), address_of(node)
                    LOG.warning("%s rank %d moves from host %s, which is lost, to %s", self.role, rank, host, new)
                return
            await asyncio.sleep(NODE_EVERY)
        raise WorkerDied(
            self.role,
            rank,
            f"{LOST.format(address_of(lost))}, and no node with GPUs that the plan leaves free has joined the cluster",
        )

    async def _build(self, ranks: Sequence[int], meeting: MeetingPoint, seconds: float) -> list[str | None]:
        """Build the strategies of some ranks. Return the names of their devices."""
        pids = await self._gather([self._actors[rank].pid.remote() for rank in ranks], "start", seconds, ranks)
        self._pids |= zip(ranks, pids, strict=True)
        refs = []
        for number in ranks:
            placement = self._placements[number]
            place = (self.role, number, len(self), meeting.address, meeting.port, placement.device)
            settled = (self._collective_timeout, placement.devices, self.replica_size, seconds, meeting.file)
            rank = Rank(*place, *settled)
            refs.append(self._actors[number].build.remote(self._settings, rank))
        building = asyncio.ensure_future(self._gather(refs, "start", seconds, ranks))
        try:
            # Search during the start, because the traces of an engine that fails to start cannot be found afterwards.
            while not building.done():
                await self._record_processes(ranks)
                await asyncio.wait({building}, timeout=LOOK_EVERY)
            names = await building
            self._built |= set(ranks)
            return names
        finally:
            building.cancel()

    async def _record_processes(self, ranks: Sequence[int]) -> None:
        """Record the child processes and shared-memory files of some ranks, as far as they are on this host."""
        pids = {rank: self._pids[rank] for rank in ranks if rank in self._pids and self.is_here(rank)}
        await asyncio.to_thread(lambda: [self._leftovers[rank].record([pid]) for rank, pid in pids.items()])

    def is_here(self, rank: int) -> bool:
        """Return whether a rank runs on this host, so that it can use the run's local folders."""
        return is_own(self._placements[rank].node_id)

    async def meeting_point(self, ranks: Sequence[int], seconds: float, one_host: bool = True) -> MeetingPoint:
        """Return where the given ranks, and others if they are on `one_host` with them, can form a process group.

        Every call returns another one, because what an earlier attempt left there would mislead the next.
        """
        if one_host and all(self.is_here(rank) for rank in ranks):
            return MeetingPoint(file=str(self._folder / f"{self.role}-{secrets.token_hex(8)}.store"))
        first = [self._actors[ranks[0]].free_address.remote()]
        return MeetingPoint(*(await self._gather(first, "free_address", seconds, [ranks[0]]))[0])

    async def run(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float, place: int = 0
    ) -> list[Any]:
        """See `Ranks`. `place` is 0 for the strategy, or the number of an object that `beside` built."""
        stored = self._stored(arguments)
        refs = [self._actors[rank].call.remote(place, method, *given) for rank, given in stored.items()]
        return await self._gather(refs, method, seconds, list(arguments))

    def _stored(self, arguments: Mapping[int, tuple[Any, ...]]) -> Mapping[int, tuple[Any, ...]]:
        """Put the lists that the ranks of a replica share into Ray's store once, not into a message to each of them."""
        by_id = {id(given): given for given in arguments.values()}
        if self.replica_size == 1 or len(by_id) != self.replicas:
            return arguments
        put = {
            key: tuple(ray.put(value) if isinstance(value, list) else value for value in given)
            for key, given in by_id.items()
        }
        return {rank: put[id(given)] for rank, given in arguments.items()}

    def processes(self) -> list[WorkerProcess]:
        """See `WatchedGroup`."""
        if self._stopped:
            return []
        return [WorkerProcess(rank, pid, self._placements[rank].node_id) for rank, pid in self._pids.items()]

    def states(self) -> list[RankState]:
        """See `ObservedGroup`."""
        if self._stopped:
            return []
        return [
            RankState(self._pids.get(rank), place.node_id, self._logs[rank], self._earlier[rank], rank in self._built)
            for rank, place in enumerate(self._placements)
        ]

    @property
    def work(self) -> str | None:
        """See `ObservedGroup`."""
        return work_of(+self._calls)

    def printed(self, rank: int) -> str:
        """Return the last text that a rank's current process printed; "" if its log is not on this host."""
        log = self._logs[rank]
        if not log.is_file():
            return ""
        with log.open("rb") as stream:
            stream.seek(max(self._earlier[rank], log.stat().st_size - LOG_TAIL))
            return stream.read().decode(errors="replace")

    def host(self, rank: int) -> str:
        """Return the address of a rank's host."""
        return address_of(self._placements[rank].node_id)

    def report_stopped(self, rank: int, cause: str) -> None:
        """See `WatchedGroup`."""
        self._killed[rank] = cause

    @property
    def batched(self) -> Ranks[S]:
        """See `Ranks`. Calls are batched if the strategy's methods are coroutines."""
        return Batched(self) if self.callers else self

    @property
    def paced(self) -> Ranks[S]:
        return self._paced

    async def colocate(self, make: Callable[[S, Rank], C], seconds: float) -> Colocated[C]:
        """Build an object from the strategy in every rank's process, called like the strategy and closed before it."""
        places = await self._gather([actor.add.remote(make) for actor in self._actors], "start", seconds)
        return Colocated(self, places[0])

    async def _gather(
        self, refs: list[Any], method: str, seconds: float, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        waits = [asyncio.ensure_future(_result(ref)) for ref in refs]
        return await self.wait(waits, method, seconds, range(len(refs)) if ranks is None else ranks)

    async def wait(
        self, waits: Sequence[asyncio.Future[Any]], method: str, seconds: float, ranks: Sequence[int]
    ) -> list[Any]:
        """Wait for calls of a method on some ranks, and return their results. Raise the same errors as `run`."""
        self._calls[method] += 1
        try:
            done, pending = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            if pending and any(wait.exception() for wait in done):
                await asyncio.wait(pending, timeout=ECHO_SECONDS)
            failures = [
                (rank, wait.exception())
                for rank, wait in zip(ranks, waits, strict=True)
                if wait.done() and wait.exception()
            ]
            late = [rank for rank, wait in zip(ranks, waits, strict=True) if not wait.done()]
            if (
                failures
                and late
                and not self._killed
                and all(self._waited_in_vain(rank, error) for rank, error in failures)
            ):
                waiting, missing = ranges(sorted(rank for rank, _ in failures)), ranges(sorted(late))
                problem = (
                    f"{method}: rank(s) {missing} did not join a collective operation in which rank(s) {waiting} waited"
                )
                raise WorkerLate(self.role, late[0], f"{problem} (logs/{self.role}-{late[0]}.log)", str(failures[0][1]))
            if failures:
                raise self._failure(failures)
            if late:
                raise self._late(method, seconds, late)
            return [wait.result() for wait in waits]
        finally:
            self._calls[method] -= 1
            for wait in waits:
                wait.cancel()

    def _late(self, method: str, seconds: float, ranks: Sequence[int]) -> WorkerFailed:
        said = f"{method} did not finish within {seconds:.0f} s on rank(s) {ranges(sorted(ranks))}"
        return WorkerLate(self.role, ranks[0], said)

    def _waited_in_vain(self, rank: int, error: BaseException | None) -> bool:
        """Return whether a rank failed because others did not join a collective. Only its log has NCCL's reason."""
        cause = _cause(error)
        if isinstance(cause, HostUnreachable):
            return False
        said = str(cause)
        if isinstance(cause, RayActorError):
            said += self.printed(rank)
        return any(sign in said.lower() for sign in TIMEOUTS)

    def _failure(self, failures: Sequence[tuple[int, BaseException | None]]) -> RollError:
        """Return the failure to report, preferably one that is not a consequence of another failure."""
        causes = [(rank, _cause(error)) for rank, error in failures]
        for _, cause in causes:
            if isinstance(cause, BadInput):
                return cause
        first = [pair for pair in causes if not _is_echo(pair[1])]
        killed = [rank for rank, _ in causes if rank in self._killed] or ([] if first else list(self._killed))
        if killed:
            return WorkerDied(self.role, killed[0], self._killed[killed[0]], str(failures[0][1]))
        rank, cause = (first or causes)[0]
        if isinstance(cause, WorkerFailed):
            return cause
        died = isinstance(cause, RayActorError | ActorUnschedulableError)
        if died and self.callers:  # an independent rank cannot have waited for others, whatever its log contains
            kind = WorkerDied
        elif self._waited_in_vain(rank, cause):
            kind = WorkerWaited
        else:
            kind = WorkerAbandoned if _is_echo(cause) else WorkerDied if died else WorkerFailed
        if died:
            said = self._death(rank, cause)
        else:
            said = f"{type(cause).__name__}: {' '.join(str(cause).split())[:LONGEST_CAUSE]}"
        return kind(self.role, rank, f"{said} (logs/{self.role}-{rank}.log)", str(dict(failures)[rank]))

    def _death(self, rank: int, cause: BaseException) -> str:
        """Return what Ray's error says of the end of a rank's process."""
        text = " ".join(str(cause).split())
        if why := NODE_DIED.search(text):
            return f"{LOST.format(self.host(rank))}: {why[1]}"
        if why := NOT_REACHED.search(text):
            return f"its process on host {self.host(rank)} was not reached for a while: {why[1]}"
        # The last line has the exception of a process that failed during its start, or tells how the process ended.
        return f"the process died: {str(cause).strip().splitlines()[-1].strip()}"

    async def peak_bytes(self) -> int | None:
        """Return the largest memory peak of any rank in bytes, or None if unknown."""
        return await self._most("peak_bytes")

    async def held_bytes(self) -> int | None:
        """Return the largest device memory that any rank holds now in bytes, or None if unknown."""
        return await self._most("held_bytes")

    async def _most(self, method: str) -> int | None:
        """Return the largest answer of the ranks. Skip dead and late ranks; the next call that needs them fails."""
        waits = [
            asyncio.ensure_future(_result(getattr(self._actors[rank], method).remote())) for rank in sorted(self._built)
        ]
        if waits:
            await asyncio.wait(waits, timeout=LOOK_SECONDS)
        said = [None if wait.cancel() or wait.exception() else wait.result() for wait in waits]
        return max((size for size in said if size is not None), default=None)

    async def stop(self, seconds: float) -> None:
        """Close the strategies, kill their processes with all child processes, and remove their shared-memory files.
        Idempotent.

        If `seconds` is 0, kill the processes without closing the strategies.
        """
        if self._stopped:
            return
        self._stopped = True
        try:
            await self._record_processes(range(len(self)))
            if self._started and seconds:
                await self._close(seconds)
        finally:
            await self._record_processes(
                range(len(self))
            )  # meanwhile, a rank may have been replaced or have started processes
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
            await asyncio.gather(*(asyncio.to_thread(leftovers.remove, GRACE) for leftovers in self._leftovers))

    async def _close(self, seconds: float) -> None:
        """Close every rank's strategy. Failures and delays are only logged: the processes are killed afterwards."""
        closing = {
            rank: asyncio.ensure_future(_result(self._actors[rank].close.remote())) for rank in sorted(self._built)
        }
        if closing:
            await asyncio.wait(closing.values(), timeout=seconds)
        for rank, wait in closing.items():
            if wait.cancel():
                LOG.info("%s rank %d was not closed after %.0f s", self.role, rank, seconds)
            elif error := wait.exception():
                LOG.info("%s rank %d did not close: %s", self.role, rank, _cause(error))


class Colocated(Ranks[S]):
    """The objects that `beside` built, as ranks."""

    def __init__(self, group: WorkerGroup[Any], place: int) -> None:
        self._group, self._place, self.replica_size = group, place, group.replica_size

    def __len__(self) -> int:
        return len(self._group)

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        return await self._group.run(method, arguments, seconds, self._place)


class Batched(Ranks[S]):
    """The ranks of a group, with batched calls."""

    def __init__(self, group: WorkerGroup[S]) -> None:
        self._group, self.replica_size = group, group.replica_size

    def __len__(self) -> int:
        return len(self._group)

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        callers = self._group.callers
        return await run_together(callers[rank].call(method, given, seconds) for rank, given in arguments.items())


def _is_echo(cause: BaseException) -> bool:
    return not isinstance(cause, HostUnreachable) and any(echo in str(cause).lower() for echo in ECHOES)


async def _result(ref: Any) -> Any:
    return await ref


def _cause(error: BaseException | None) -> BaseException:
    """Return the original error of a worker, without Ray's wrapper."""
    assert error is not None
    if isinstance(error, RayTaskError):
        return getattr(error, "cause", None) or error
    return error.cause if isinstance(error, Failure) else error
