"""The domains with environments, and the tasks that these make themselves. Pure functions of the configuration."""

from __future__ import annotations

from roll.config.schema.rlvr import RlvrConfig

ENVIRONMENTS = "environments."
"""Of the names of groups that run environments."""


def own_tasks(config: RlvrConfig) -> dict[str, int]:
    """By domain whose environment makes its own tasks, how many there are to train on."""
    return {domain: section.rows for domain, section in config.environments.items() if section.rows is not None}
