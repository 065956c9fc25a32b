"""Checks every agent before the run starts its roles: its command must exist, or its function must be callable."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping

from roll.agents.gateway.agent import CHECK, KEPT_CHARACTERS, command_of, own_environment
from roll.config.schema.environments import AgentConfig, EnvironmentConfig
from roll.errors import Fault


def agent_faults(sections: Mapping[str, EnvironmentConfig], seconds: float) -> Iterator[Fault]:
    """Yield the faults of all agents.

    Args:
        sections: configuration of the environments, by domain.
        seconds: deadline for the import of a function's module.
    """
    for domain, section in sections.items():
        if section.agent is None:
            continue
        place = f"environments.{domain}.agent"
        if section.agent.function is not None:
            yield from _function(
                f"{place}.function", section.agent.function, {**own_environment(), **section.system_envs}, seconds
            )
        else:
            yield from _command(f"{place}.command", command_for(section.agent), section.system_envs)


def command_for(agent: AgentConfig) -> tuple[str, ...]:
    """Return the command that runs an agent."""
    if agent.function is not None:
        return command_of(agent.function)
    assert agent.command, "an agent without a command or a function is a fault"
    return agent.command


def _function(place: str, name: str, environment: Mapping[str, str], seconds: float) -> Iterator[Fault]:
    remedy = "give a `package.module:function` that accepts row, base_url and api_key"
    try:
        command = [*command_of(name), CHECK]
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield Fault(place, f"'{name}' was not imported after {seconds:g} s", "fix the module, or raise deadlines.start")
        return
    if done.returncode:
        said = f"{done.stdout.strip()} {done.stderr.strip()}".strip()[-KEPT_CHARACTERS:]
        yield Fault(place, f"'{name}' cannot be used: {said or f'it ended with status {done.returncode}'}", remedy)


def _command(place: str, command: tuple[str, ...], environment: Mapping[str, str]) -> Iterator[Fault]:
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        yield Fault(
            place,
            f"'{command[0]}' is not found on this machine",
            "name a program that is on the PATH, or give its path",
        )
