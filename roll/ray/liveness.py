"""Finds dead and stopped ranks that no caller has noticed.

Ray reports the death of a process only to its callers. It reports neither stopped processes (SIGSTOP) nor the death of
a process that nobody calls. Therefore the kernel's state of every process of a role is checked on the process's own
node. A process that stays stopped is killed, so that its calls fail at once and nothing of it remains.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import SubprocessError
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.errors import WorkerDied
from roll.ray.cluster import temporary
from roll.ray.placement import address_of
from roll.system.caretaker import Caretaker
from roll.system.event_loop import guarded
from roll.system.signs import ProcessActivity, process_activity
from roll.system.tree import Problem, ProcessFinding, end_family, find_stopped

LOG = logging.getLogger(__name__)
EVERY = 2.0
"""Seconds between two checks."""
LOOKS = {Problem.GONE: 2, Problem.STOPPED: 6}
"""Consecutive checks that must find a problem. A count, not a time, as Ctrl-Z stops the checks too."""
LOOKS_SILENT = 2
"""Consecutive checks without an answer after which a host that has answered before is reported. Ray takes it for dead
later, after about a minute.
"""
ANSWER_SECONDS = 10.0
"""Deadline in seconds for a node's report. A late node is queried again at the next check."""
HEARD_SECONDS = 5.0
"""Seconds after which a pending call on a dead process has failed, with an error that says how it ended."""


@dataclass(frozen=True)
class WorkerProcess:
    """The process of a rank."""

    rank: int
    pid: int
    node_id: str | None
    """Ray's id of the process's node, None for the driver's node."""


class WatchedGroup(Protocol):
    """A role's processes."""

    role: str

    def processes(self) -> Sequence[WorkerProcess]:
        """Return the processes that should be running. Empty once the group is being ended."""
        ...

    def report_stopped(self, rank: int, cause: str) -> None:
        """Note that a rank is about to be killed. Its calls will fail with this cause."""
        ...


class Nodes(Protocol):
    """The nodes of the cluster by id. None is the driver's node."""

    async def process_findings(self, node_id: str | None, pids: Mapping[int, bool]) -> dict[int, ProcessFinding]:
        """See `find_stopped`."""
        ...

    async def end_family(self, node_id: str | None, pid: int) -> None:
        """See `process_states.end_family`."""
        ...

    def address(self, node_id: str | None) -> str:
        """Return the address of a node that has been asked, without asking for it."""
        ...


class Liveness:
    """Checks the processes of a run's roles."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._groups: dict[str, tuple[WatchedGroup, bool]] = {}
        self._seen: set[tuple[str, WorkerProcess]] = set()
        self._counts: dict[tuple[str, WorkerProcess], tuple[Problem, int]] = {}
        self._silences: dict[str | None, int] = {}  # by node that has answered, consecutive checks without an answer

    def watch(self, group: WatchedGroup, with_children: bool) -> None:
        """Check a group from now on, instead of the previous group of its role.

        With `with_children`, a process also counts as stopped if one of its child processes is stopped, such as vLLM's
        engine.
        """
        self._groups[group.role] = (group, with_children)

    @asynccontextmanager
    async def watched(self, is_awaited: Callable[[str], bool]) -> AsyncIterator[None]:
        """A context in which all groups are checked. It is cancelled if a rank of an awaited role is dead or stopped.

        Raises:
            WorkerDied: a rank of an awaited role died or is stopped.
        """
        async with guarded(self._watch(is_awaited)):
            yield

    async def _watch(self, is_awaited: Callable[[str], bool]) -> None:
        while True:
            await asyncio.sleep(EVERY)
            lost = [failure for failure in await self.check() if is_awaited(failure.role)]
            if lost:
                await asyncio.sleep(HEARD_SECONDS)
                raise lost[0]

    async def check(self) -> list[WorkerDied]:
        """Check all processes once, and kill stopped ones.

        Return a failure for each rank that is now certain to be dead or stopped. Later checks do not return it again.
        """
        by_node: dict[str | None, dict[int, bool]] = {}
        looked_at: list[tuple[WatchedGroup, Sequence[WorkerProcess]]] = []
        for group, with_children in self._groups.values():
            looked_at.append((group, processes := group.processes()))
            for process in processes:
                by_node.setdefault(process.node_id, {})[process.pid] = with_children
        answers = await asyncio.gather(*(self._examined(node_id, pids) for node_id, pids in by_node.items()))
        found = dict(zip(by_node, answers, strict=True))
        lost = []
        for group, processes in looked_at:
            running = set(group.processes())  # some may have ended meanwhile
            for process in processes:
                findings = found[process.node_id]
                if findings is None or process not in running:
                    continue
                finding = findings.get(process.pid)
                if self._is_certain((group.role, process), finding) and finding is not None:
                    lost.append(await self._report(group, process, finding))
                    running = set(group.processes())
        return lost

    async def _examined(self, node_id: str | None, pids: Mapping[int, bool]) -> dict[int, ProcessFinding] | None:
        """Return the findings for processes of a node, None if the node does not answer."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = await self._nodes.process_findings(node_id, pids)
            self._note_answer(node_id, True)
            return found
        except (TimeoutError, RayError, OSError) as error:
            self._note_answer(node_id, False)
            LOG.info("node %s does not report the states of its processes: %s", node_id, str(error) or "no answer")
            return None

    def _note_answer(self, node_id: str | None, has_come: bool) -> None:
        """Report a host that has fallen silent, and one that answers again."""
        silence = self._silences.get(node_id)
        if has_come:
            self._silences[node_id] = 0
            if silence is not None and silence >= LOOKS_SILENT:
                LOG.warning("host %s answers again", self._nodes.address(node_id))
        elif silence is not None:
            self._silences[node_id] = silence + 1
            if silence + 1 == LOOKS_SILENT:
                LOG.warning("host %s does not answer", self._nodes.address(node_id))

    def _is_certain(self, process: tuple[str, WorkerProcess], finding: ProcessFinding | None) -> bool:
        """Return whether this check is the one that makes a problem certain.

        A process that was never seen running does not count as gone: it may be invisible here.
        """
        if finding is None:
            self._seen.add(process)
            self._counts.pop(process, None)
            return False
        if finding.problem is Problem.GONE and process not in self._seen:
            return False
        problem, count = self._counts.get(process, (finding.problem, 0))
        count = count + 1 if problem is finding.problem else 1
        self._counts[process] = (finding.problem, count)
        return count == LOOKS[finding.problem]

    async def _report(self, group: WatchedGroup, process: WorkerProcess, finding: ProcessFinding) -> WorkerDied:
        own = finding.pid == process.pid
        what = (
            f"its process {finding.pid}"
            if own
            else f"process {finding.pid}, a descendant of its process {process.pid},"
        )
        failure = WorkerDied(
            group.role, process.rank, f"{what} {finding.problem} (logs/{group.role}-{process.rank}.log)"
        )
        LOG.warning("%s", failure)
        if finding.problem is Problem.STOPPED:
            group.report_stopped(process.rank, failure.cause)
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._nodes.end_family(process.node_id, process.pid)
            except (TimeoutError, RayError) as error:
                LOG.warning("process %d could not be killed: %s", process.pid, error)
        return failure


class RayNodes:
    """Implements `Nodes` and `ActivityReaders`: a thread checks the driver's node, an actor every other node."""

    def __init__(self) -> None:
        self._probes: dict[str | None, Any] = {}
        self._addresses: dict[str | None, str] = {}

    def address(self, node_id: str | None) -> str:
        return self._addresses.get(node_id, "of the driver")

    async def process_findings(self, node_id: str | None, pids: Mapping[int, bool]) -> dict[int, ProcessFinding]:
        if is_own(node_id):
            return await asyncio.to_thread(find_stopped, pids)
        return await self._probe(node_id).process_findings.remote(dict(pids))

    async def end_family(self, node_id: str | None, pid: int) -> None:
        if is_own(node_id):
            await asyncio.to_thread(end_family, pid)
        else:
            await self._probe(node_id).end_family.remote(pid)

    async def process_activities(
        self, node_id: str | None, asked: Sequence[tuple[int | None, Path, int]]
    ) -> list[ProcessActivity]:
        if is_own(node_id):
            return await asyncio.to_thread(_activities, asked)
        return await self._probe(node_id).process_activities.remote(list(asked))

    def _probe(self, node_id: str | None) -> Any:
        if node_id not in self._probes:
            assert node_id is not None, "the driver's node needs no probe"
            self._addresses[node_id] = address_of(node_id)
            there = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._probes[node_id] = Probe.options(scheduling_strategy=there).remote()  # pyright: ignore[reportFunctionMemberAccess]
        return self._probes[node_id]


def is_own(node_id: str | None) -> bool:
    """Return whether a node is the node of this process."""
    return node_id in (None, ray.get_runtime_context().get_node_id())


@ray.remote(num_cpus=0, max_restarts=-1)
class Probe:
    """An actor that checks the processes of its node, and lets a `Caretaker` look after them."""

    def __init__(self) -> None:
        self._caretaker: Caretaker | None = None
        self._is_first = True

    def process_findings(self, pids: Mapping[int, bool]) -> dict[int, ProcessFinding]:
        """See `find_stopped`."""
        if self._is_first:
            self._is_first = False
            try:
                self._caretaker = Caretaker(temporary())
            except (OSError, SubprocessError):  # the checks of processes do not need it
                LOG.warning("no caretaker: what killed workers leave on this host stays there", exc_info=True)
        if self._caretaker is not None:
            self._caretaker.watch(pids)
        return find_stopped(pids)

    def end_family(self, pid: int) -> None:
        """See `process_states.end_family`."""
        end_family(pid)

    def process_activities(self, asked: Sequence[tuple[int | None, Path, int]]) -> list[ProcessActivity]:
        """See `roll.system.signs`."""
        return _activities(asked)


def _activities(asked: Sequence[tuple[int | None, Path, int]]) -> list[ProcessActivity]:
    return [process_activity(*one) for one in asked]
