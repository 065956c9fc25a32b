"""Worker groups on Ray, with strategies that need no model: deadlines, causes of failures, and no leftovers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from roll.backend import Rank
from roll.config.derived.placement import RolePlan
from roll.errors import ConfigError, DataError, Fault, WorkerDied, WorkerFailed, WorkerLate
from roll.ray import liveness
from roll.ray.cluster import LONGEST_SOCKET, check_gpus, cluster, temporary
from roll.ray.group import WorkerGroup
from roll.ray.liveness import Liveness, RayNodes
from roll.ray.placement import worker_placements
from roll.system.tree import Problem, ProcessFinding
from tests import limits

pytestmark = pytest.mark.engines


class Picky(Exception):
    """An exception that pickle cannot rebuild."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


class Worker:
    """A strategy with a method for each behaviour that the tests need."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.place = rank.rank, rank

    def replica(self) -> tuple[int, int]:
        return self.place.rank // self.place.replica_size, self.place.replica_size

    def environment(self, name: str) -> str:
        return os.environ[name]

    def niceness(self) -> int:
        return os.nice(0)

    def fail(self, rank: int) -> int:
        if self.rank == rank:
            raise Picky("a cause", "its detail")
        raise RuntimeError("Connection closed by peer")

    def meet(self, late: int, release: Path) -> int:
        self.wait(late, release)
        raise RuntimeError("[gloo] Timed out waiting 1000ms for recv operation to complete")

    def wait(self, rank: int, release: Path) -> int:
        """Make one rank wait until a file exists; the others return at once."""
        if self.rank == rank:
            limits.until(release.exists, f"{release} is there", limits.RUN)
        return self.rank

    def die(self, rank: int, release: Path) -> None:
        if self.rank == rank:
            os._exit(7)
        self.wait(self.rank, release)  # like a rank in a collective that does not notice the death

    def close(self) -> None:
        pass


class Engine:
    """An engine whose `answer` waits until `resume` is called."""

    def __init__(self) -> None:
        self._may_answer, self._asked = asyncio.Event(), 0

    async def start(self) -> None:
        pass

    async def answer(self) -> int:
        self._asked += 1
        await self._may_answer.wait()
        return 1

    async def asked(self) -> int:
        return self._asked

    async def fail(self) -> None:
        raise Picky("a cause", "its detail")

    async def never(self) -> None:
        await asyncio.Event().wait()

    async def die(self) -> None:
        os._exit(7)

    async def process_and_child(self) -> list[int]:
        """Return the ids of this process and of a child that would survive it."""
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10 ** 6)"], start_new_session=True)
        return [os.getpid(), child.pid]

    async def resume(self) -> None:
        self._may_answer.set()
        self._asked, self._may_answer = 0, asyncio.Event()

    async def close(self) -> None:
        pass


@dataclass(frozen=True)
class WorkerSettings:
    readable: bool = True

    def build(self, rank: Rank) -> Worker:
        if not self.readable:
            raise DataError(Fault("pretrain", "it cannot be read", "give another", "unreadable"))
        return Worker(rank)


@dataclass(frozen=True)
class EngineSettings:
    def build(self, rank: Rank) -> Engine:
        return Engine()


GROUPS = ("engine", "trainer")


def imports_forever(on_cpu: bool) -> None:
    time.sleep(limits.RUN)


def imports_nothing(on_cpu: bool) -> None: ...


@asynccontextmanager
async def group_of_two(logs: Path, readable: bool = True, replica_size: int = 1) -> AsyncIterator[WorkerGroup[Worker]]:
    places = worker_placements(RolePlan("trainer", "none", ((), ())), 8, {"COLOUR": "blue"})
    group: WorkerGroup[Worker] = WorkerGroup(
        "trainer", places, logs, logs / "held", blocking=True, replica_size=replica_size
    )
    try:
        await group.start(WorkerSettings(readable), limits.START, limits.START)
        yield group
    finally:
        await group.stop(limits.EXPIRY)


def is_stopped(probe: Any, pid: int) -> bool:
    return ray.get(probe.process_findings.remote({pid: True})) == {pid: ProcessFinding(Problem.STOPPED, pid)}


async def finds_what_is_stopped(logs: Path) -> None:
    async with group_of_two(logs) as group:
        nodes = RayNodes()
        watch = Liveness(nodes)
        watch.watch(group, with_children=True)
        stopped, waiting = group.processes()
        calls = asyncio.ensure_future(group.within(limits.RUN).all(Worker.die, -1, logs / "never"))
        probe = nodes._probe(ray.get_runtime_context().get_node_id())  # the probe that is used for other nodes
        async with watch.watched(lambda role: False):
            os.kill(stopped.pid, signal.SIGSTOP)
            limits.until(lambda: is_stopped(probe, stopped.pid), "the probe finds the stopped process", limits.CALL)
            with pytest.raises(
                WorkerDied, match=rf"^trainer rank 0: its process {stopped.pid} is stopped \(SIGSTOP\) \(logs/trainer-0"
            ):
                await calls
        limits.until(lambda: not psutil.pid_exists(stopped.pid), "the stopped process is gone", limits.END)
        await probe.end_family.remote(waiting.pid)
        limits.until(lambda: not psutil.pid_exists(waiting.pid), "the process that the probe ended is gone", limits.END)


async def reads_no_earlier_log(logs: Path) -> None:
    """The log of an earlier run contains a collective's timeout. In this run a rank is killed, which must be the
    reported cause.
    """
    (logs / "trainer-0.log").write_text("[gloo] Timed out waiting 1000ms for recv operation to complete\n")
    async with group_of_two(logs) as group:
        with pytest.raises(WorkerFailed, match="^trainer rank 0: the process died"):
            await group.within(limits.CALL).all(Worker.die, 0, logs / "never")


async def names_who_is_late(group: WorkerGroup[Worker], folder: Path) -> None:
    """Check that the late rank is reported, and not the rank that waited for it. Once released, the late rank takes its
    next call.
    """
    answered, late = (actor.call.remote(0, "wait", 1, folder / "slept") for actor in group._actors)
    await answered
    with pytest.raises(WorkerLate, match=r"^trainer rank 1: wait .* 1 s .*1$"):
        await group._gather([answered, late], "wait", limits.EXPIRY)
    (folder / "slept").touch()
    with pytest.raises(WorkerFailed, match=r"^trainer rank 1: meet: .*rank\(s\) 0 waited \(logs/trainer-1"):
        await group.within(limits.CALL).all(Worker.meet, 1, folder / "met")
    (folder / "met").touch()


async def fails_where_calls_travel_together(group: WorkerGroup[Engine]) -> None:
    """Check that batched calls fail like single calls."""
    calls = group.batched.within(limits.CALL)
    answer = asyncio.ensure_future(calls.one(0, Engine.asked))
    with pytest.raises(WorkerFailed, match=r"^engine rank 0: RuntimeError: Picky: .* \(logs/engine-0.log\)$") as raised:
        await calls.one(0, Engine.fail)
    assert "in fail" in raised.value.traceback
    assert await answer >= 0
    with pytest.raises(WorkerLate, match=r"^engine rank 0: never .* 1 s .*0$"):
        await group.batched.within(limits.EXPIRY).one(0, Engine.never)
    waiting = asyncio.ensure_future(calls.one(0, Engine.never))
    for failing in (calls.one(0, Engine.die), waiting, calls.one(0, Engine.asked)):
        with pytest.raises(WorkerDied, match="^engine rank 0: the process died"):
            await failing


async def replaces_one_process(group: WorkerGroup[Engine], log: Path) -> None:
    """Replace rank 0, which has died, and again after SIGSTOP and after SIGKILL. A call that waits on rank 1 is not
    affected.
    """
    calls = group.batched.within(limits.CALL)
    other = asyncio.ensure_future(calls.one(1, Engine.answer))
    await group.replace(0, limits.START)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        pids = await calls.one(0, Engine.process_and_child)
        waiting = asyncio.ensure_future(calls.one(0, Engine.never))
        assert await calls.one(0, Engine.asked) == 0
        with log.open("a") as stream:
            stream.write("a download timed out\n")
        os.kill(pids[0], number)
        await group.replace(0, limits.START)
        with pytest.raises(WorkerDied, match="^engine rank 0: the process died"):
            await waiting
        limits.until(
            lambda pids=pids: not any(psutil.pid_exists(pid) for pid in pids),
            "the old process and its child are gone",
            limits.END,
        )
    while await calls.one(1, Engine.asked) < 1:
        await asyncio.sleep(limits.LOOK)
    await calls.all(Engine.resume)
    assert await other == 1


async def hears_the_sync_behind_many_prompts(logs: Path) -> None:
    places = worker_placements(RolePlan("engine", "none", ((), ())), 8, {})
    group: WorkerGroup[Engine] = WorkerGroup("engine", places, logs, logs / "held", blocking=False)
    try:
        await group.start(EngineSettings(), limits.START, limits.START)
        for ranks in (group, group.batched):
            answers = [asyncio.ensure_future(ranks.within(limits.PROCESS).one(0, Engine.answer)) for _ in range(4500)]
            while await group.within(limits.CALL).one(0, Engine.asked) < len(answers):
                await asyncio.sleep(limits.LOOK)
            await group.within(limits.CALL).one(0, Engine.resume)
            assert sum(await asyncio.gather(*answers)) == 4500
        await fails_where_calls_travel_together(group)
        await replaces_one_process(group, logs / "engine-0.log")
    finally:
        await group.stop(limits.EXPIRY)


def reads_the_imports_of_unused_processes(logs: Path, printed: list[object]) -> None:
    """A process that ends while it imports fails the imports that wait for it. Nobody starts either group."""
    places = worker_placements(RolePlan("trainer", "none", ((),)), 8, {})
    engine, trainer = (WorkerGroup[Any](role, places, logs, logs / "held", role == "trainer") for role in GROUPS)
    trainer.preload(imports_nothing, engine.preload(imports_forever))
    ray.kill(engine._actors[0])
    ray.get(trainer._actors[0].pid.remote(), timeout=limits.START)  # the calls of a process are answered in order
    assert printed == []


def test_group(tmp_path: Path, leaves_nothing: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """All scenarios share one cluster, because starting Ray takes seconds."""

    async def behaves() -> None:
        async with group_of_two(tmp_path / "logs") as group:
            calls = group.within(limits.CALL)
            assert await calls.all(Worker.environment, "COLOUR") == ["blue", "blue"]
            assert await calls.all(Worker.environment, "RANK") == ["0", "1"]
            assert await calls.all(Worker.niceness) == [os.nice(0)] * 2, "workers have the driver's niceness"
            assert await calls.each(Worker.wait, [(2, tmp_path), (2, tmp_path)]) == [0, 1]
            with monkeypatch.context() as patch:
                patch.setattr("roll.ray.group.ECHO_SECONDS", limits.CALL)  # the cause may arrive long after its echo
                picky = r"^trainer rank 1: RuntimeError: Picky: .* \(logs/trainer-1.log\)$"
                with pytest.raises(WorkerFailed, match=picky):
                    await calls.all(Worker.fail, 1)
            await names_who_is_late(group, tmp_path)
            assert (await group.peak_bytes() or 0) > 1 << 20
            assert await group.held_bytes() is None  # on the CPU
            with pytest.raises(WorkerFailed, match="^trainer rank 0: the process died"):
                await calls.all(Worker.die, 0, tmp_path / "never")

    async def refuses() -> None:
        with pytest.raises(DataError, match="it cannot be read"):
            async with group_of_two(tmp_path / "logs", readable=False):
                pass

    async def ends_what_hangs() -> None:
        async with group_of_two(tmp_path / "logs", replica_size=2) as group:
            assert await group.within(limits.CALL).each_replica(Worker.replica, [()]) == [(0, 2)]
            assert await group.within(limits.CALL).each(Worker.replica, [(), ()]) == [(0, 2), (0, 2)]
            pids = [
                int(pid)
                for pid in await group._gather([actor.pid.remote() for actor in group._actors], "pid", limits.CALL)
            ]
            hanging = asyncio.ensure_future(group.within(limits.RUN).all(Worker.wait, 0, tmp_path / "never"))
            await asyncio.sleep(0)  # let the task make its calls
        hanging.cancel()
        limits.until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "its processes are gone", limits.END)

    with cluster(tmp_path, gpus=0, gpus_per_node=8) as session:
        assert session.shared_memory.is_dir() and session.scratch.is_dir()
        for scenario in (behaves, refuses, ends_what_hangs):
            asyncio.run(scenario())
        asyncio.run(hears_the_sync_behind_many_prompts(tmp_path / "logs"))
        asyncio.run(reads_no_earlier_log(tmp_path / "logs"))
        with monkeypatch.context() as patch:
            patch.setattr("ray._private.worker._unhandled_error_handler", (printed := list[object]()).append)
            reads_the_imports_of_unused_processes(tmp_path / "logs", printed)
        monkeypatch.setattr(liveness, "EVERY", limits.LOOK)
        asyncio.run(finds_what_is_stopped(tmp_path / "logs"))
        with pytest.raises(ConfigError, match="for 16 GPUs, .* none on"):
            check_gpus(16, 8)
    assert (tmp_path / "logs" / "trainer-0.log").exists()
    leaves_nothing()


def test_long_temporary_folder_is_not_used_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with cluster(tmp_path, gpus=0, gpus_per_node=8) as session:
        assert session.scratch.parent == Path("/tmp")
        (socket,) = session.scratch.glob("r/session_2*/sockets/plasma_store")
        assert len(str(socket)) <= LONGEST_SOCKET
    assert not session.scratch.exists()
    monkeypatch.setattr(tempfile, "tempdir", "/short")
    assert temporary() == Path("/short")
