"""Finds dead and stopped ranks that no caller has noticed, and bounds how long a call may stay unanswered.

Ray only reports a dead process to its callers. It reports neither a stopped process (SIGSTOP) nor the death of one that nobody calls.
So every process of a role is observed from its own node, by its state in the kernel. One that stays stopped is killed, so that
its calls fail at once and nothing of it is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.errors import WorkerDied
from roll.system.process_states import Finding, Problem, end_family, examine
from roll.system.signs import Look, look
from roll.workers.calls import Ranks
from roll.workers.guarded import guarded

S = TypeVar("S", covariant=True)
LOG = logging.getLogger(__name__)
EVERY = 2.0
"""Seconds between two checks."""
LOOKS = {Problem.GONE: 2, Problem.STOPPED: 6}
"""Number of consecutive checks that must find a process stopped. Counted, not timed: Ctrl-Z stops the checks together with the run."""
ANSWER_SECONDS = 10.0
"""Deadline in seconds for a node's report. A late node is asked again at the next check."""
HEARD_SECONDS = 5.0
"""Seconds in which a call on a dead process fails by itself, with an error that says how the process ended."""
FLOOR_SECONDS = 600.0
"""Least seconds before a call counts as one without progress, however short previous calls were."""
LONGEST_TIMES = 3.0
"""A call that takes this many times as long as the longest previous one makes no progress."""


@dataclass(frozen=True)
class WorkerProcess:
    """The process of a rank."""

    rank: int
    pid: int
    node_id: str | None
    """Ray's id of its node, None for this process's node."""


class WatchedGroup(Protocol):
    """A role's processes."""

    role: str

    def processes(self) -> Sequence[WorkerProcess]:
        """Return the processes that run and are not being ended."""
        ...

    def report_stopped(self, rank: int, cause: str) -> None:
        """Note that a rank is about to be killed. Its calls fail with this cause."""
        ...


class Nodes(Protocol):
    """The nodes of the cluster by id. None is this process's node."""

    async def examine(self, node_id: str | None, pids: Mapping[int, bool]) -> dict[int, Finding]:
        """See `process_states.examine`."""
        ...

    async def end_family(self, node_id: str | None, pid: int) -> None:
        """See `process_states.end_family`."""
        ...


class Liveness:
    """Checks the processes of a run's roles."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._groups: dict[str, tuple[WatchedGroup, bool]] = {}
        self._seen: set[tuple[str, WorkerProcess]] = set()
        self._counts: dict[tuple[str, WorkerProcess], tuple[Problem, int]] = {}

    def watch(self, group: WatchedGroup, with_children: bool) -> None:
        """Check a group from here on, in place of its role's previous group.

        `with_children` counts a stopped child of a process as the process: an engine of vLLM runs in one.
        """
        self._groups[group.role] = (group, with_children)

    @asynccontextmanager
    async def watched(self, is_awaited: Callable[[str], bool]) -> AsyncIterator[None]:
        """Check while the block lasts. End the work if a rank of an awaited role is dead or stopped, even without a call on it.

        Raises:
            WorkerDied: such a rank died or is stopped.
        """
        async with guarded(self._watch(is_awaited)):
            yield

    async def _watch(self, is_awaited: Callable[[str], bool]) -> None:
        while True:
            await asyncio.sleep(EVERY)
            lost = [failure for failure in await self.look() if is_awaited(failure.role)]
            if lost:
                await asyncio.sleep(HEARD_SECONDS)
                raise lost[0]

    async def look(self) -> list[WorkerDied]:
        """Check all processes once. Return newly found ranks, each only once. Stopped ones are killed."""
        by_node: dict[str | None, dict[int, bool]] = {}
        looked_at: list[tuple[WatchedGroup, WorkerProcess]] = []
        for group, with_children in self._groups.values():
            for process in group.processes():
                by_node.setdefault(process.node_id, {})[process.pid] = with_children
                looked_at.append((group, process))
        answers = await asyncio.gather(*(self._examined(node_id, pids) for node_id, pids in by_node.items()))
        found = dict(zip(by_node, answers, strict=True))
        lost = []
        for group, process in looked_at:
            findings = found[process.node_id]
            if findings is not None and process in group.processes():  # the process may have ended meanwhile
                finding = findings.get(process.pid)
                if self._is_certain((group.role, process), finding) and finding is not None:
                    lost.append(await self._report(group, process, finding))
        return lost

    async def _examined(self, node_id: str | None, pids: Mapping[int, bool]) -> dict[int, Finding] | None:
        """Return the states, None if the node does not answer."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._nodes.examine(node_id, pids)
        except (TimeoutError, RayError, OSError) as error:
            LOG.info("node %s does not say what its processes do: %s", node_id, error)
            return None

    def _is_certain(self, process: tuple[str, WorkerProcess], finding: Finding | None) -> bool:
        """Whether a finding has just become frequent enough. A process that was never seen running may be invisible here."""
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

    async def _report(self, group: WatchedGroup, process: WorkerProcess, finding: Finding) -> WorkerDied:
        own = finding.pid == process.pid
        what = f"its process {finding.pid}" if own else f"process {finding.pid}, which its process {process.pid} has started,"
        failure = WorkerDied(group.role, process.rank, f"{what} {finding.problem} (logs/{group.role}-{process.rank}.log)")
        LOG.warning("%s", failure)
        if finding.problem is Problem.STOPPED:
            group.report_stopped(process.rank, failure.cause)
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._nodes.end_family(process.node_id, process.pid)
            except (TimeoutError, RayError) as error:
                LOG.warning("process %d could not be ended: %s", process.pid, error)
        return failure


class RayNodes:
    """Implements `Nodes` and `Lookers`: checks this node in a thread, and each other one by an actor there."""

    def __init__(self) -> None:
        self._probes: dict[str | None, Any] = {}

    async def examine(self, node_id: str | None, pids: Mapping[int, bool]) -> dict[int, Finding]:
        """See `Nodes`."""
        if is_own(node_id):
            return await asyncio.to_thread(examine, pids)
        return await self._probe(node_id).examine.remote(dict(pids))

    async def end_family(self, node_id: str | None, pid: int) -> None:
        """See `Nodes`."""
        if is_own(node_id):
            await asyncio.to_thread(end_family, pid)
        else:
            await self._probe(node_id).end_family.remote(pid)

    async def look(self, node_id: str | None, asked: Sequence[tuple[int | None, Path, int]]) -> list[Look]:
        """See `Lookers`."""
        if is_own(node_id):
            return await asyncio.to_thread(_looks, asked)
        return await self._probe(node_id).look.remote(list(asked))

    def _probe(self, node_id: str | None) -> Any:
        if node_id not in self._probes:
            assert node_id is not None, "this node needs no probe"
            there = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._probes[node_id] = Probe.options(scheduling_strategy=there).remote()  # pyright: ignore[reportFunctionMemberAccess]
        return self._probes[node_id]


def is_own(node_id: str | None) -> bool:
    """Whether a node is this process's node."""
    return node_id in (None, ray.get_runtime_context().get_node_id())


@ray.remote(num_cpus=0, max_restarts=-1)
class Probe:
    """Checks the processes of its node."""

    def examine(self, pids: Mapping[int, bool]) -> dict[int, Finding]:
        """See `process_states.examine`."""
        return examine(pids)

    def end_family(self, pid: int) -> None:
        """See `process_states.end_family`."""
        end_family(pid)

    def look(self, asked: Sequence[tuple[int | None, Path, int]]) -> list[Look]:
        """See `signs.look`."""
        return _looks(asked)


def _looks(asked: Sequence[tuple[int | None, Path, int]]) -> list[Look]:
    return [look(*one) for one in asked]


class Paced(Ranks[S]):
    """Ranks whose calls end early without progress."""

    def __init__(self, ranks: Ranks[S]) -> None:
        self._ranks, self._times, self.replica_size = ranks, CallTimes(), ranks.replica_size

    def __len__(self) -> int:
        return len(self._ranks)

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        """See `Ranks`."""
        began = time.monotonic()
        results = await self._ranks.run(method, arguments, self._times.limit(method, seconds))
        self._times.note(method, time.monotonic() - began)
        return results


class CallTimes:
    """Durations of a role's calls by method, which bound the next call."""

    def __init__(self) -> None:
        self._longest: dict[str, float] = {}

    def note(self, method: str, seconds: float) -> None:
        """Note that a call took so many seconds."""
        self._longest[method] = max(seconds, self._longest.get(method, 0.0))

    def limit(self, method: str, deadline: float) -> float:
        """Return the seconds after which a call is stuck: three times the longest before, at least `FLOOR_SECONDS`, at most the deadline.

        The first call of a method, which may compile, may take as long as its deadline.
        """
        longest = self._longest.get(method)
        return deadline if longest is None else min(deadline, max(FLOOR_SECONDS, LONGEST_TIMES * longest))
