"""Starts and closes environment processes for tests, and makes messages of the policy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from roll.agents.environments.process import EnvironmentProcess
from roll.config.schema.environments import EnvironmentConfig
from tests import limits
from tests.unit.rewards.running import children_of

KINDS = ("World", "Awaited")
"""Classes of worlds.py: one with plain methods, one with asynchronous methods."""


def environment_children() -> list[int]:
    """Return the ids of the environment processes below this process."""
    return children_of(b"roll.agents.environments.child")


def section(**others: Any) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate({"environment": "worlds:World", "step_timeout": limits.CALL, **others})


@asynccontextmanager
async def process(**others: Any) -> AsyncIterator[EnvironmentProcess]:
    """Start an environment process, and close it whatever happens."""
    environments = EnvironmentProcess("act", section(**others), limits.START)
    try:
        await environments.start()
        yield environments
    finally:
        await environments.close()


def says(text: str) -> dict[str, Any]:
    """Return a message of the policy."""
    return {"role": "assistant", "content": text}


def calls(*named: tuple[str, str]) -> dict[str, Any]:
    """Return a message of the policy that calls tools. Each call is a tool's name and the JSON text of its
    arguments.
    """
    asked = [
        {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": given}}
        for number, (name, given) in enumerate(named)
    ]
    return {"role": "assistant", "content": None, "tool_calls": asked}
