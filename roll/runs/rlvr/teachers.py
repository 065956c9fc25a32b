"""Calls the teachers of on-policy distillation. Each of them processes the step's sequences of its domains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from roll.data import packing
from roll.rollout.batch import Experience
from roll.runs.device_phases import DevicePhases
from roll.types import Floats, RolloutGroup, Sequences


class Teacher(Protocol):
    """A model whose outputs the policy learns."""

    async def states(self, sequences: Sequences) -> Floats:
        """Return the teacher's output [S, W] for the S response tokens of sequences."""
        ...


@dataclass(frozen=True)
class DomainTeacher:
    """One teacher and its domains."""

    role: str
    domains: Collection[str]
    teacher: Teacher


@dataclass(frozen=True)
class StepTeachers:
    """All teachers of a run, called one after the other. Every domain has exactly one teacher."""

    teachers: Sequence[DomainTeacher]
    phases: DevicePhases
    part: Callable[[str], AbstractContextManager[None]]
    """Times the calls as `teacher`, without the time of onloading; see `Meter.part`."""

    async def states(self, groups: Sequence[RolloutGroup], step: Experience) -> Floats:
        """Return the teachers' outputs [S, W] for the S response tokens of the step, in the order of its sequences."""
        domains = np.array([group.prompt.domain for group in groups])[step.groups][step.episode_of_sequence]
        parts = list[tuple[np.ndarray, Floats]]()
        for one in self.teachers:
            own = np.flatnonzero(np.isin(domains, list(one.domains))).tolist()
            if own:
                await self.phases.scoring(one.role)
                with self.part("teacher"):
                    sent = await one.teacher.states(packing.select(step.sequences, own))
                parts.append((packing.response_rows(step.sequences, own), sent))
        out = np.empty((int(step.sequences.response_mask.sum()), parts[0][1].shape[1]), np.float32)
        for rows, sent in parts:
            out[rows] = sent
        return out
