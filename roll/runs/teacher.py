"""Wires both ends of distillation: the teacher model that sends its output, and the student model that uses this
output.

Calls the teachers of on-policy distillation. Each of them processes the step's sequences of its domains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from roll.algorithms.divergence import Divergence
from roll.backend_settings import ModelLoader, ModelWrapper
from roll.config.derived.fixed_roles import taught_domains
from roll.config.schema.model import ModelConfig
from roll.config.schema.offline import DistillConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import ReferenceConfig
from roll.data import packing
from roll.models.student import (
    PackedTeacher,
    PackedTopTeacher,
    TeacherTop,
    load_top_student,
    output_rows,
    student_loader,
)
from roll.rollout.batch import Experience
from roll.runs.device_phases import DevicePhases
from roll.runs.model_paths import model_name, model_path
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


@dataclass(frozen=True)
class Teaching:
    """Functions that build the student, of hidden states or a top-k distribution, and the teacher that sends them."""

    load: ModelLoader
    wrap: ModelWrapper


def teaching(config: DistillConfig | RlvrConfig, student: ModelConfig, teachers: Sequence[ModelConfig]) -> Teaching:
    """Return the functions for top-k distributions with `distill_top_k`, otherwise for hidden states, which yield full
    distributions.

    Several teachers require `distill_top_k`. All of them send tensors of the same width, over the tokens that every
    model has.

    Raises:
        DataError: the configuration of a model cannot be read.
    """
    measure = Divergence(config.divergence, config.jsd_beta, config.distill_temperature)
    if config.distill_top_k is None:
        [teacher] = teachers
        return Teaching(student_loader(model_name(config, teacher), teacher, measure), PackedTeacher)
    rows = min(
        output_rows(model_path(config, model_args), model_args.trust_remote_code) for model_args in (student, *teachers)
    )
    top = TeacherTop(min(config.distill_top_k, rows), rows, config.distill_temperature)
    return Teaching(partial(load_top_student, top=top, measure=measure), partial(PackedTopTeacher, top=top))


def policy_teaching(config: RlvrConfig, teachers: Mapping[str, ReferenceConfig]) -> Teaching | None:
    """Return the functions for the policy and its teachers, by role; None without a teacher."""
    if not teachers:
        return None
    return teaching(config, config.actor_train.model_args, [role.model_args for role in teachers.values()])


def step_teachers(
    config: RlvrConfig,
    phases: DevicePhases,
    part: Callable[[str], AbstractContextManager[None]],
    teachers: Mapping[str, Teacher],
) -> StepTeachers | None:
    """Return all teachers with their domains; None if there are none."""
    domains = taught_domains(config) if teachers else {}
    found = [DomainTeacher(role, domains[role], teacher) for role, teacher in teachers.items()]
    return StepTeachers(found, phases, part) if found else None
