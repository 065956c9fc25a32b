"""Calls the teachers of on-policy distillation. Each of them processes the step's sequences of its domains."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from roll.data import packing
from roll.rollout.batch import Experience
from roll.types import Floats, RolloutGroup, Sequences


@dataclass(frozen=True)
class DomainTeacher:
    """One teacher and its domains."""

    role: str
    domains: Collection[str]
    states: Callable[[Sequences], Awaitable[Floats]]
    """Returns the teacher's output [S, W] for the S response tokens of sequences."""


@dataclass(frozen=True)
class StepTeachers:
    """All teachers of a run, called one after the other. Every domain has exactly one teacher."""

    teachers: Sequence[DomainTeacher]
    onload: Callable[[str], Awaitable[None]]
    """Onloads a role before its call."""

    async def __call__(self, groups: Sequence[RolloutGroup], step: Experience) -> Floats:
        """Return the teachers' outputs [S, W] for the S response tokens of the step, in the order of its sequences."""
        domains = np.array([group.prompt.domain for group in groups])[step.groups][step.episode_of_sequence]
        parts = list[tuple[np.ndarray, Floats]]()
        for teacher in self.teachers:
            own = np.flatnonzero(np.isin(domains, list(teacher.domains))).tolist()
            if own:
                await self.onload(teacher.role)
                sent = await teacher.states(packing.select(step.sequences, own))
                parts.append((packing.response_rows(step.sequences, own), sent))
        out = np.empty((int(step.sequences.response_mask.sum()), parts[0][1].shape[1]), np.float32)
        for rows, sent in parts:
            out[rows] = sent
        return out
