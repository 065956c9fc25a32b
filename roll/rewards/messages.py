"""What a process of rewards and its parent tell each other: pickles behind their length, of plain values where there are many."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.errors import Fault
from roll.rewards.base import RewardTraits
from roll.rewards.parts import RewardPart
from roll.types import Prompt, RewardOutcome, RewardResult, TurnReward

OUTCOMES = {outcome.value: outcome for outcome in RewardOutcome}
Fields = tuple[float, str, Mapping[str, float], str, tuple[tuple[int, float], ...]]
"""Value, outcome, parts, note and turns."""
HEADER = struct.Struct(">Q")
Entry = tuple[int, int, Prompt, Sequence[str]]
"""Number of the first call, number of the part, and what to score."""
Answer = tuple[int, list[Fields]]
"""Number of the call, and a result for each of its responses."""


@dataclass(frozen=True)
class Assignment:
    """What a child is for."""

    domain: str
    parts: tuple[RewardPart, ...]
    concurrency: int
    timeout: float
    """Seconds, of each call. The child keeps it of asynchronous ones; the parent does of all."""


@dataclass(frozen=True)
class Ready:
    """What a child says before it is given calls."""

    faults: tuple[Fault, ...]
    """With any, it ends."""
    traits: tuple[RewardTraits, ...] = ()
    """Of each part."""
    ends_calls: bool = False
    """It ends late calls itself, as long as its event loop runs."""


def encoded(message: Any) -> bytes:
    """A message as it travels."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def fields(result: RewardResult) -> Fields:
    """A result as it travels: a pickle of plain values is made and read several times faster."""
    turns = tuple((turn.end, turn.value) for turn in result.turns) if result.turns else ()
    return result.value, result.outcome.value, result.parts, result.note, turns


def result_of(value: float, outcome: str, parts: Mapping[str, float], note: str, turns: tuple[tuple[int, float], ...]) -> RewardResult:
    """The result of these fields."""
    return RewardResult(value, OUTCOMES[outcome], parts, note, tuple(TurnReward(*turn) for turn in turns) if turns else ())
