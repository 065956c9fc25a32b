"""Plans the faults of a campaign from the seed alone, so that each of its runs can be repeated by itself."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Whose process is hit."""

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
    """Phase of the run for the fault."""

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
"""Number of steps of each run, enough for its faults, most of which wait for a phase of a step."""
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
"""Processes without a costly start. A run has as many of these faults as its others leave room for."""
ENDS = (
    ((Kind.RAYLET, False), (Kind.GCS, True)),
    ((Kind.DRIVER, True), (Kind.RAYLET, True)),
    ((Kind.GCS, False), (Kind.DRIVER, False)),
)
"""Faults that end runs with even numbers, in turn, and whether the process is stopped. Runs with odd numbers start with a killed driver."""
TOGETHER = 0.4
"""Share of the faults that are injected together with the previous one."""
STOPPED = 0.4
"""Share of SIGSTOP; the others are SIGKILL."""


@dataclass(frozen=True)
class PlannedFault:
    """One signal to one process."""

    kind: Kind
    is_stop: bool
    """Whether the signal is SIGSTOP, not SIGKILL."""
    phase: Phase
    rank: int
    """If its role has so many."""
    at_once: bool
    """Whether it is injected together with the previous fault, not after that has healed."""

    @property
    def name(self) -> str:
        """For tables."""
        return f"{'stop' if self.is_stop else 'kill'} {self.kind}"


def planned(seed: int, faults: int) -> list[list[PlannedFault]]:
    """Return the faults of each run in order. Even and odd runs have different placements."""
    runs = [_run(random.Random(f"{seed} {number}"), number) for number in range(-(-faults // PER_RUN))]
    kept = faults - PER_RUN * (len(runs) - 1)
    return [*runs[:-1], runs[-1][:kept]]


def _run(draw: random.Random, number: int) -> list[PlannedFault]:
    """Return the faults of a run: one that ends it, two of the trainer's side, three of engines, the others of reward processes."""
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
    return PlannedFault(kind, stop, draw.choice(PHASES[kind]), draw.randrange(2), kind not in ENDS_RUN and draw.random() < TOGETHER)
