"""Processes of environments under test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from roll.config.schema.environments import EnvironmentConfig
from roll.environments.process import EnvironmentProcess
from tests import limits
from tests.unit.rewards.running import children_of

KINDS = ("World", "Awaited")
"""Of worlds.py: plain, and asynchronous."""


def environment_children() -> list[int]:
    """Processes of environments that this process holds."""
    return children_of(b"roll.environments.child")


def section(**others: Any) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate({"environment": "worlds:World", "step_timeout": limits.CALL, **others})


@asynccontextmanager
async def process(**others: Any) -> AsyncIterator[EnvironmentProcess]:
    """Started, and closed whatever happens."""
    environments = EnvironmentProcess("act", section(**others), limits.START)
    try:
        await environments.start()
        yield environments
    finally:
        await environments.close()


def says(text: str) -> dict[str, Any]:
    """A message of the policy."""
    return {"role": "assistant", "content": text}


def calls(*named: tuple[str, str]) -> dict[str, Any]:
    """A message of the policy that calls tools, with the JSON text of their arguments."""
    asked = [
        {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": given}}
        for number, (name, given) in enumerate(named)
    ]
    return {"role": "assistant", "content": None, "tool_calls": asked}
