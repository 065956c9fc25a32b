"""The current activity of the processes of a run's roles, observed on their own nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ray.exceptions import RayError

from roll.system.signs import Activity, ProcessActivity

LOG = logging.getLogger(__name__)
ANSWER_SECONDS = 3.0
"""Deadline in seconds for the answer of a node. After a missing answer, the previous stage is still shown."""
WORK = {
    "train_step": "training",
    "generate": "generating",
    "score": "scoring",
    "log_probs": "computing log-probs",
    "values": "computing values",
    "states": "computing hidden states",
    "save": "writing a checkpoint",
    "load": "reading a checkpoint",
    "export": "exporting",
    "offload": "offloading from its devices",
    "onload": "onloading to its devices",
    "load_bucket": "loading weights",
    "load_adapter": "loading an adapter",
}
"""Descriptions of a strategy's methods for users. Other methods are shown by their name."""
PROBES = {"cause_of_death", "activity"}
"""Methods that only query a rank, at any time. They are no work, and are not shown."""
NO_PROCESS = "starting its process"
READY = "ready"


@dataclass(frozen=True)
class RankState:
    """The state of a rank, as known to the driver."""

    pid: int | None
    """Process id, None before the process has answered."""
    node_id: str | None
    log: Path
    begin: int
    """Number of bytes of the log that are from earlier processes."""
    is_built: bool


class ObservedGroup(Protocol):
    """A role's processes."""

    role: str

    def states(self) -> Sequence[RankState]:
        """Return the states by rank. Empty once the ranks are being ended."""
        ...

    @property
    def work(self) -> str | None:
        """Description of an unanswered call on the ranks, None if all calls are answered."""
        ...


class ActivityReaders(Protocol):
    """The nodes of the cluster by id. None is the driver's node."""

    async def process_activities(
        self, node_id: str | None, asked: Sequence[tuple[int | None, Path, int]]
    ) -> list[ProcessActivity]:
        """Call `roll.system.signs` for several processes of a node."""
        ...


class RoleActivity:
    """Observes the roles' processes. It remembers how far each log was read, and the latest stage of each process."""

    def __init__(self, lookers: ActivityReaders) -> None:
        self._lookers = lookers
        self._ends: dict[Path, int] = {}
        self._stages: dict[Path, str] = {}

    async def of(self, group: ObservedGroup, progress: str) -> Activity | None:
        """Return a role's current activity, or None if its group is being ended. `progress` describes it."""
        states = group.states()
        if not states:
            return None
        looks, work = await self._read(states), group.work
        stages = [self._stage(state, found, work) for state, found in zip(states, looks, strict=True)]
        usages = [found.usage for found in looks if found and found.usage]
        usage = sum(usages[1:], usages[0]) if usages else None
        return Activity(
            group.role, common_stage(stages), usage, progress, is_busy=any(stage != READY for stage in stages)
        )

    async def _read(self, states: Sequence[RankState]) -> list[ProcessActivity | None]:
        """Return the activity of each rank, None if its node does not answer. Each node gets one message."""
        by_node: dict[str | None, list[int]] = {}
        for rank, state in enumerate(states):
            by_node.setdefault(state.node_id, []).append(rank)
        found: list[ProcessActivity | None] = [None] * len(states)

        async def ask(node_id: str | None, ranks: Sequence[int]) -> None:
            there = await self._read_node(node_id, [states[rank] for rank in ranks])
            for rank, one in zip(ranks, there, strict=True):
                found[rank] = one

        await asyncio.gather(*(ask(node_id, ranks) for node_id, ranks in by_node.items()))
        return found

    async def _read_node(self, node_id: str | None, states: Sequence[RankState]) -> Sequence[ProcessActivity | None]:
        asked = list[tuple[int | None, Path, int]]()
        for state in states:
            if self._ends.get(state.log, 0) < state.begin:  # the rank has a new process
                self._stages.pop(state.log, None)
            asked.append((state.pid, state.log, max(state.begin, self._ends.get(state.log, 0))))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                there = await self._lookers.process_activities(node_id, asked)
        except (TimeoutError, RayError, OSError) as error:
            LOG.info("node %s does not report the activity of its processes: %s", node_id, str(error) or "no answer")
            return [None] * len(states)
        for state, found in zip(states, there, strict=True):
            self._ends[state.log] = found.end
            if found.stage:
                self._stages[state.log] = found.stage
        return there

    def _stage(self, state: RankState, found: ProcessActivity | None, work: str | None) -> str:
        stage = (work or READY) if state.is_built else self._stages.get(state.log, NO_PROCESS)
        return f"{stage}, compiling" if found and found.compiles and not stage.startswith("compiling") else stage


def work_of(methods: Iterable[str]) -> str | None:
    """Return the description of the work of ranks that run these methods of their strategy; None if they only probe."""
    return next((WORK.get(method, method.replace("_", " ")) for method in methods if method not in PROBES), None)


def common_stage(stages: Sequence[str]) -> str:
    """Return one text for all ranks: their common stage, or each stage with its number of ranks."""
    counts = {stage: stages.count(stage) for stage in dict.fromkeys(stages)}
    if len(counts) == 1:
        return stages[0]
    return "; ".join(f"{stage} ({count} of {len(stages)} ranks)" for stage, count in counts.items())
