"""The teachers of on-policy distillation, and their domains. Pure functions of the configuration."""

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
    """Return the roles of all teachers, by name: `teacher`, or `teachers.<name>`. It is empty without distillation."""
    return {"teacher": config.teacher} if config.teacher else domain_teachers(config)


def taught_domains(config: RlvrConfig) -> dict[str, Collection[str]]:
    """Return the domains of each teacher, by the name of its role. The role `teacher` has all domains."""
    if config.teacher:
        return {"teacher": tuple(config.domains)}
    return {f"{TEACHERS}{name}": teacher.domains for name, teacher in config.teachers.items()}
