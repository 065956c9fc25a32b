"""Which faults a campaign injects: a function of the seed alone, so that a run of it can be taken again by itself."""

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
    """What the run does at that moment."""

    START = "start"
    GENERATE = "generate"
    SYNC = "sync"
    MOVE = "move"
    TRAIN = "train"
    SAVE = "save"


ENDS_RUN = (Kind.DRIVER, Kind.RAYLET, Kind.GCS)
"""Without them there is no run: the same command resumes it."""
TRAINER_SIDE = (Kind.TRAINER, Kind.REFERENCE)
"""Their group starts anew from the last checkpoint."""
STEPS = 24
"""Of each run; enough for its faults, most of which wait for a phase of a step."""
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
"""They cost no start of an engine or of the trainer: a run has as many of them in turn as its other faults leave room."""
ENDS = (
    ((Kind.RAYLET, False), (Kind.GCS, True)),
    ((Kind.DRIVER, True), (Kind.RAYLET, True)),
    ((Kind.GCS, False), (Kind.DRIVER, False)),
)
"""What ends runs with even numbers, in turn, and whether it is stopped. Those with odd ones begin with a driver that is killed."""
TOGETHER = 0.4
"""Share of the faults that come at once with the one before."""
STOPPED = 0.4
"""Share of SIGSTOP; the others are SIGKILL."""


@dataclass(frozen=True)
class PlannedFault:
    """One signal to one process."""

    kind: Kind
    is_stop: bool
    """SIGSTOP; otherwise SIGKILL."""
    phase: Phase
    rank: int
    """If its role has so many."""
    at_once: bool
    """Not when the fault before has healed, but together with it."""

    @property
    def name(self) -> str:
        """For tables."""
        return f"{'stop' if self.is_stop else 'kill'} {self.kind}"


def planned(seed: int, faults: int) -> list[list[PlannedFault]]:
    """By run, its faults in their order. Runs with even numbers have another placement than those with odd ones."""
    runs = [_run(random.Random(f"{seed} {number}"), number) for number in range(-(-faults // PER_RUN))]
    kept = faults - PER_RUN * (len(runs) - 1)
    return [*runs[:-1], runs[-1][:kept]]


def _run(draw: random.Random, number: int) -> list[PlannedFault]:
    """One run: what ends it, two faults of the trainer's side, three of engines, the others of what gives rewards."""
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
