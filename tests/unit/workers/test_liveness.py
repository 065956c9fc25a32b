"""Liveness checks: when a stopped or dead process is reported, and how long a call may take."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from roll.errors import WorkerDied
from roll.ray import liveness
from roll.ray.batching import FLOOR_SECONDS, CallTimes, Paced, Ranks
from roll.ray.liveness import LOOKS, Liveness, WorkerProcess
from roll.system.tree import Problem, ProcessFinding
from tests import limits

STOPPED, GONE = ProcessFinding(Problem.STOPPED, 11), ProcessFinding(Problem.GONE, 11)


class Group:
    """An implementation of `WatchedGroup` with two ranks on different nodes."""

    def __init__(self, role: str = "actor_train") -> None:
        self.role = role
        self.ranks = [WorkerProcess(0, 10, None), WorkerProcess(1, 11, "far")]
        self.stopped: dict[int, str] = {}

    def processes(self) -> Sequence[WorkerProcess]:
        return self.ranks

    def report_stopped(self, rank: int, cause: str) -> None:
        self.stopped[rank] = cause


class Machine:
    """An implementation of `Nodes` that returns the findings that a test sets."""

    def __init__(self) -> None:
        self.findings: dict[int, ProcessFinding] = {}
        self.asked: list[tuple[str | None, dict[int, bool]]] = []
        self.ended: list[tuple[str | None, int]] = []
        self.is_silent = False

    async def process_findings(self, node_id: str | None, pids: Mapping[int, bool]) -> dict[int, ProcessFinding]:
        self.asked.append((node_id, dict(pids)))
        if self.is_silent and node_id == "far":
            raise TimeoutError
        return {pid: finding for pid, finding in self.findings.items() if pid in pids}

    def address(self, node_id: str | None) -> str:
        return f"10.0.0.{node_id}"

    async def end_family(self, node_id: str | None, pid: int) -> None:
        self.ended.append((node_id, pid))


def watching(group: Group) -> tuple[Machine, Liveness]:
    machine = Machine()
    watch = Liveness(machine)
    watch.watch(group, with_children=True)
    return machine, watch


def looks(watch: Liveness, count: int) -> list[WorkerDied]:
    async def look() -> list[WorkerDied]:
        return [failure for _ in range(count) for failure in await watch.check()]

    return asyncio.run(look())


def test_stopped_process_is_named_and_killed() -> None:
    group = Group()
    machine, watch = watching(group)
    assert looks(watch, 1) == []
    assert machine.asked == [(None, {10: True}), ("far", {11: True})]
    machine.findings = {11: STOPPED}
    assert looks(watch, LOOKS[Problem.STOPPED] - 1) == [] and not machine.ended
    (failure,) = looks(watch, 1)
    assert str(failure) == "actor_train rank 1: its process 11 is stopped (SIGSTOP) (logs/actor_train-1.log)"
    assert machine.ended == [("far", 11)] and group.stopped == {1: failure.cause}
    assert looks(watch, 20) == [], "a stopped process is reported once"


def test_short_stop_and_silent_node_raise_no_alarm() -> None:
    group = Group()
    machine, watch = watching(group)
    for _ in range(3):
        machine.findings = {11: STOPPED}
        assert looks(watch, LOOKS[Problem.STOPPED] - 1) == []
        machine.findings = {}
        assert looks(watch, 1) == []
    machine.findings, machine.is_silent = {11: STOPPED}, True
    assert looks(watch, 20) == []
    machine.is_silent, group.ranks = False, []
    assert looks(watch, 20) == []


def test_silent_host_is_reported_once_and_when_back(caplog: pytest.LogCaptureFixture) -> None:
    machine, watch = watching(Group())
    machine.is_silent = True
    looks(watch, 5)
    assert not caplog.messages, "its probe may still be starting"
    for is_silent, count in ((False, 1), (True, 1), (False, 1), (True, 5), (False, 2)):
        machine.is_silent = is_silent
        looks(watch, count)
    assert caplog.messages == ["host 10.0.0.far does not answer", "host 10.0.0.far answers again"]


def test_dead_process_is_reported_if_once_seen() -> None:
    group = Group()
    machine, watch = watching(group)
    machine.findings = {11: GONE}
    assert looks(watch, 20) == [], "a process that was never seen may run in another PID namespace"
    machine.findings = {}
    looks(watch, 1)
    machine.findings = {11: GONE}
    (failure,) = looks(watch, 20)
    assert (failure.role, failure.rank) == ("actor_train", 1)
    assert failure.cause.endswith("process 11 is gone (logs/actor_train-1.log)")
    assert not machine.ended and not group.stopped, "Ray reports the death to callers"


def test_a_stopped_child_is_told_as_such() -> None:
    machine, watch = watching(Group("actor_infer"))
    machine.findings = {10: ProcessFinding(Problem.STOPPED, 99)}
    (failure,) = looks(watch, LOOKS[Problem.STOPPED])
    assert failure.cause.startswith("process 99, ") and "process 10, " in failure.cause
    assert failure.cause.endswith("is stopped (SIGSTOP) (logs/actor_infer-0.log)")
    assert machine.ended == [(None, 10)]


def test_work_ends_for_stopped_awaited_roles_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in ("EVERY", "HEARD_SECONDS"):
        monkeypatch.setattr(liveness, seconds, limits.NONE)

    async def work(role: str) -> None:
        machine, watch = watching(Group(role))
        async with watch.watched(lambda role: role == "critic"):
            machine.findings = {11: STOPPED}
            await limits.comes_true(lambda: bool(machine.ended), "the process is ended")
            await asyncio.sleep(limits.LOOK)
            await limits.comes_true(lambda: role != "critic", "this is never reached")

    asyncio.run(work("actor_infer"))
    with pytest.raises(WorkerDied, match="^critic rank 1: .*process 11 is stopped"):
        asyncio.run(work("critic"))


def test_call_limit_is_three_times_longest_call() -> None:
    times, deadline = CallTimes(), 10 * FLOOR_SECONDS
    assert times.limit("train_step", deadline) == deadline, "the first call compiles"
    times.note("train_step", FLOOR_SECONDS / 30)
    assert times.limit("train_step", deadline) == FLOOR_SECONDS
    times.note("train_step", FLOOR_SECONDS / 2)
    times.note("train_step", FLOOR_SECONDS / 4)
    assert times.limit("train_step", deadline) == 1.5 * FLOOR_SECONDS
    assert times.limit("train_step", FLOOR_SECONDS / 6) == FLOOR_SECONDS / 6
    assert times.limit("save", deadline) == deadline


class Scorer:
    """A strategy with two methods."""

    def score(self, number: int) -> int:
        return number

    def other(self) -> int:
        return 0


class Answering(Ranks[Scorer]):
    """Ranks that answer at once and record the deadlines of calls."""

    def __init__(self) -> None:
        self.deadlines: list[float] = []

    def __len__(self) -> int:
        return 2

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        self.deadlines.append(seconds)
        return [getattr(Scorer(), method)(*given) for given in arguments.values()]


def test_paced_calls_have_the_deadline_of_their_method() -> None:
    async def run() -> list[float]:
        ranks = Answering()
        paced = Paced(ranks)
        calls = paced.within(limits.RUN)
        assert len(paced) == 2 and await calls.all(Scorer.score, 3) == [3, 3]
        assert await calls.all(Scorer.score, 4) == [4, 4]
        await calls.all(Scorer.other)
        return ranks.deadlines

    assert asyncio.run(run()) == [limits.RUN, FLOOR_SECONDS, limits.RUN]
