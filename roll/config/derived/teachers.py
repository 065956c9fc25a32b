"""The teachers of on-policy distillation by role, and their domains. Pure functions."""

from __future__ import annotations

from collections.abc import Collection

from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import ReferenceConfig

TEACHERS = "teachers."
"""Prefix of the names of the roles in the block `teachers`."""


def domain_teachers(config: RlvrConfig) -> dict[str, ReferenceConfig]:
    """Return the roles of the block `teachers`, by name: `teachers.<name>`."""
    return {f"{TEACHERS}{name}": teacher for name, teacher in config.teachers.items()}


def teacher_roles(config: RlvrConfig) -> dict[str, ReferenceConfig]:
    """Return all teachers: `teacher`, or `teachers.<name>`. Empty without distillation."""
    return {"teacher": config.teacher} if config.teacher else domain_teachers(config)


def taught_domains(config: RlvrConfig) -> dict[str, Collection[str]]:
    """Return the domains of each teacher, by role. The role `teacher` teaches all of them."""
    if config.teacher:
        return {"teacher": tuple(config.domains)}
    return {f"{TEACHERS}{name}": teacher.domains for name, teacher in config.teachers.items()}
