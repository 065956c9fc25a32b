"""Which faults a campaign injects: a function of the seed alone, so that a run of it can be taken again by itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
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
CHEAP = (Kind.REWARD, Kind.CHILD, Kind.REWARD, Kind.CHILD, Kind.JUDGE)
"""Of every run, beside the kinds that cost a start."""
TOGETHER = 0.25
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
    """One run: two that end it, two of the trainer's side, three of engines, the others of what gives rewards."""
    ends = (*_ordered(draw, ENDS_RUN)[:1], ENDS_RUN[number % len(ENDS_RUN)])
    engines = (Kind.ENGINE, Kind.CORE)
    kinds = _ordered(draw, [*CHEAP, *TRAINER_SIDE, *engines, *ends])
    faults = [_fault(draw, kind) for kind in kinds]
    place = next(place for place, fault in enumerate(faults) if fault.kind in engines and not fault.is_stop or place == len(faults) - 1)
    again = PlannedFault(Kind.ENGINE, False, Phase.START, faults[place].rank, at_once=True)
    faults.insert(place + 1, again)
    if number % 2:  # a start is killed before anything else
        faults.remove(next(fault for fault in faults if fault.kind in ENDS_RUN))
        faults.insert(0, PlannedFault(Kind.DRIVER, False, Phase.START, 0, at_once=False))
    return faults


def _fault(draw: random.Random, kind: Kind) -> PlannedFault:
    return PlannedFault(
        kind, draw.random() < STOPPED, draw.choice(PHASES[kind]), draw.randrange(2), kind not in ENDS_RUN and draw.random() < TOGETHER
    )


def _ordered(draw: random.Random, kinds: Sequence[Kind]) -> list[Kind]:
    return draw.sample(list(kinds), len(kinds))
