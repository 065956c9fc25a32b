"""The environments of domains, and the tasks that they make. Pure functions of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from roll.config.shipped import known_environments

if TYPE_CHECKING:  # the processes of environments do not import the schema
    from roll.config.schema.environments import EnvironmentConfig
    from roll.config.schema.rlvr import RlvrConfig

ENVIRONMENTS = "environments."
"""Prefix of the names of worker groups that run environments."""
TOOL_USE = "tool_use"
"""Environment of a domain that has only tools or an agent."""
MOST_STEPS: Mapping[str, int] = {"frozen_lake": 10, "sokoban": 20, "code_repl": 4}
"""Default of `max_steps`, by environment. Only the built-in environments with this key are listed."""


def own_tasks(config: RlvrConfig) -> dict[str, int]:
    """Return the number of training tasks of each domain whose environment makes its own tasks."""
    return {domain: section.rows for domain, section in config.environments.items() if section.rows is not None}


def environment_of(domain: str, section: EnvironmentConfig) -> str:
    """Return the name of a domain's environment: the given one, else the domain's name, or `TOOL_USE` if it only has
    tools or an agent.
    """
    if section.environment is not None:
        return section.environment
    has_tools = section.tools or section.mcp or section.agent
    return TOOL_USE if has_tools and domain not in known_environments() else domain
