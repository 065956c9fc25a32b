"""Plans the faults of a campaign from the seed alone, so that each run of the campaign can be repeated separately."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The process that a fault hits."""

    ENGINE = "engine"
    CORE = "vLLM's process"
    TRAINER = "trainer rank"
    REFERENCE = "reference"
    REWARD = "reward worker"
    CHILD = "reward's process"
    JUDGE = "judge"
    DRIVER = "driver"
    RAYLET = "raylet"
    GCS = "GCS"


class Phase(StrEnum):
    """The phase of the run in which a fault is injected."""

    START = "start"
    GENERATE = "generate"
    SYNC = "sync"
    MOVE = "move"
    TRAIN = "train"
    SAVE = "save"


ENDS_RUN = (Kind.DRIVER, Kind.RAYLET, Kind.GCS)
"""Processes whose loss ends the run. The same command resumes it."""
TRAINER_SIDE = (Kind.TRAINER, Kind.REFERENCE)
"""Roles whose group restarts from the last checkpoint."""
STEPS = 24
"""Number of steps of each run. Most faults wait for a phase of a step, so there must be enough steps for all faults."""
PER_RUN = 12
WORK = (Phase.GENERATE, Phase.SYNC, Phase.TRAIN, Phase.SAVE)
PHASES = {
    Kind.ENGINE: WORK,
    Kind.CORE: WORK,
    Kind.TRAINER: WORK,
    Kind.REFERENCE: WORK,
    Kind.REWARD: (Phase.GENERATE, Phase.TRAIN, Phase.SYNC),
    Kind.CHILD: (Phase.GENERATE, Phase.TRAIN, Phase.SYNC),
    Kind.JUDGE: (Phase.GENERATE, Phase.TRAIN, Phase.SYNC),
    Kind.DRIVER: WORK,
    Kind.RAYLET: WORK,
    Kind.GCS: WORK,
}
CHEAP = (Kind.REWARD, Kind.CHILD, Kind.JUDGE)
"""Processes that start quickly. Their faults fill a run up to `PER_RUN`."""
ENDS = (
    ((Kind.RAYLET, False), (Kind.GCS, True)),
    ((Kind.DRIVER, True), (Kind.RAYLET, True)),
    ((Kind.GCS, False), (Kind.DRIVER, False)),
)
"""Pairs of faults, one pair for each even-numbered run, in turn. Each fault ends the run's command, which is then
started again. True means that the process is stopped instead of killed.

An odd-numbered run starts with a killed driver instead.
"""
TOGETHER = 0.4
"""Probability that a fault that does not end the run is injected together with the previous one."""
STOPPED = 0.4
"""Probability of SIGSTOP; otherwise the signal is SIGKILL."""


@dataclass(frozen=True)
class PlannedFault:
    """One signal to one process."""

    kind: Kind
    is_stop: bool
    """Whether the signal is SIGSTOP instead of SIGKILL."""
    phase: Phase
    rank: int
    """Rank of the process in its role. If the role has fewer ranks, the lowest one is hit."""
    at_once: bool
    """Whether the fault is injected together with the previous one, without waiting until that one has healed."""

    @property
    def name(self) -> str:
        """Return the name for tables."""
        return f"{'stop' if self.is_stop else 'kill'} {self.kind}"


def planned(seed: int, faults: int) -> list[list[PlannedFault]]:
    """Return the faults of each run in order. Even and odd runs have different placements."""
    runs = [_run(random.Random(f"{seed} {number}"), number) for number in range(-(-faults // PER_RUN))]
    kept = faults - PER_RUN * (len(runs) - 1)
    return [*runs[:-1], runs[-1][:kept]]


def _run(draw: random.Random, number: int) -> list[PlannedFault]:
    """Return the faults of a run: some end its command, two hit the trainer's side, three engines, and the others
    rewards and judges.
    """
    starts = [PlannedFault(Kind.DRIVER, False, Phase.START, 0, at_once=False)] if number % 2 else []
    ends = [] if starts else [_fault(draw, kind, is_stop) for kind, is_stop in ENDS[number // 2 % len(ENDS)]]
    engines = [_fault(draw, Kind.ENGINE), _fault(draw, Kind.CORE)]
    again = PlannedFault(Kind.ENGINE, False, Phase.START, 0, at_once=True)
    others = [_fault(draw, kind) for kind in TRAINER_SIDE]
    room = PER_RUN - len(starts) - len(ends) - len(engines) - len(others) - 1
    others += [_fault(draw, CHEAP[place % len(CHEAP)]) for place in range(room)]
    faults = draw.sample([*ends, *engines, *others], PER_RUN - len(starts) - 1)
    place = next(place for place, fault in enumerate(faults) if fault in engines)
    return [*starts, *faults[: place + 1], again, *faults[place + 1 :]]


def _fault(draw: random.Random, kind: Kind, is_stop: bool | None = None) -> PlannedFault:
    stop = draw.random() < STOPPED if is_stop is None else is_stop
    return PlannedFault(
        kind, stop, draw.choice(PHASES[kind]), draw.randrange(2), kind not in ENDS_RUN and draw.random() < TOGETHER
    )
