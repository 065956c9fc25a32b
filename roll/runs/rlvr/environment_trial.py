"""Tries environments, their tools and external agents before anything starts, so that faults are reported early.

A dry run tries them too, so this module imports neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from roll.agents.environments.base import Observation
from roll.agents.environments.process import EnvironmentProcess
from roll.agents.gateway.agent import CHECK, KEPT_CHARACTERS, command_for, command_of, own_environment
from roll.config.derived.domains import environment_of
from roll.config.schema.environments import EnvironmentConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import ConfigError, EnvironmentFailed, Fault
from roll.hosted.process import HostedProcessFailed

TRIAL_SEED = 0


def environments_with_variables(config: RlvrConfig) -> dict[str, EnvironmentConfig]:
    """Return the configuration of the environments by domain, each with the environment variables of the run."""
    return {
        domain: section.model_copy(update={"system_envs": {**config.system_envs, **section.system_envs}})
        for domain, section in config.environments.items()
    }


async def try_environments(
    sections: Mapping[str, EnvironmentConfig],
    firsts: Mapping[str, Mapping[str, Any]],
    start_seconds: float,
    problem_of: Callable[[Observation], str],
    sees: bool = False,
) -> list[Fault]:
    """Import the environment and the tools of every domain, and reset the environment twice on a row.

    Args:
        sections: configuration of the environments, by domain.
        firsts: one row of each domain that has rows. The environments of other domains are only imported.
        start_seconds: deadline for a process to import its environment.
        problem_of: returns the reason why the run's model cannot accept a first observation, or an empty string.
        sees: whether the policy sees pictures.

    Returns:
        The faults of all domains.
    """
    found = await asyncio.gather(
        *(
            _environment_faults(name, section, firsts.get(name), start_seconds, problem_of, sees)
            for name, section in sections.items()
        )
    )
    return [fault for faults in found for fault in faults]


async def _environment_faults(
    domain: str,
    section: EnvironmentConfig,
    row: Mapping[str, Any] | None,
    start_seconds: float,
    problem_of: Callable[[Observation], str],
    sees: bool,
) -> list[Fault]:
    place, process = f"environments.{domain}", EnvironmentProcess(domain, section, start_seconds, sees)
    tried = f"'{environment_of(domain, section)}', reset on the first row of its domain,"
    try:
        await process.start()
        if row is None:
            return []
        first, again = [await _reset(process, session, row) for session in range(2)]
        if first != again:
            differs = f"{tried} twice with one seed, returns different observations, but a group begins with equal ones"
            return [Fault(f"{place}.environment", differs, "draw all that differs from row and seed", "unfit")]
        problem = problem_of(first)
        remedy = "fix the value that reset returns, or raise prompt_length if it is too long"
        unfit = f"{tried} returns an observation that the model cannot accept: {problem}"
        return [Fault(f"{place}.environment", unfit, remedy, "unfit")] if problem else []
    except ConfigError as error:
        return list(error.faults)
    except HostedProcessFailed as error:
        return [Fault(place, str(error), "fix the module of the environment, or raise deadlines.start", "failed")]
    except EnvironmentFailed as failed:
        problem = f"{tried} fails: {failed}"
        columns = f"the row has the columns {', '.join(map(str, row or ()))}"
        if failed.reason == "timed_out":
            late = f"make it faster, or raise {place}.step_timeout"
            return [Fault(f"{place}.environment", problem, late, "timed_out")]
        to_fix = "the class" if ":" in environment_of(domain, section) else "environment_args or the row"
        return [Fault(f"{place}.environment", problem, f"fix {to_fix}; {columns}", "failed")]
    finally:
        await process.close()


async def _reset(process: EnvironmentProcess, session: int, row: Mapping[str, Any]) -> Observation:
    """Return the first observation of an episode, which ends at once: a server may have room for a single one."""
    try:
        return await process.open(session, row, TRIAL_SEED)
    finally:
        await process.end(session)


def agent_faults(sections: Mapping[str, EnvironmentConfig], seconds: float) -> Iterator[Fault]:
    """Yield the faults of all agents. `sections` are by domain, `seconds` is the deadline for a module's import."""
    for domain, section in sections.items():
        if section.agent is None:
            continue
        place = f"environments.{domain}.agent"
        variables = {**own_environment(), **section.system_envs}
        if (function := section.agent.function) is not None:
            remedy = "give a `package.module:function` that accepts row, base_url and api_key"
            yield from _checked(f"{place}.function", function, command_of(function), variables, remedy, seconds)
        elif (played := section.agent.verifiers) is not None:
            found = list(_command_faults(f"{place}.verifiers.python", (played.python,), section.system_envs))
            remedy = f"install the packages of the environment, and verifiers, for {played.python}"
            command = command_for(section.agent)
            yield from found or _checked(f"{place}.verifiers", played.env_id, command, variables, remedy, seconds)
        else:
            yield from _command_faults(f"{place}.command", command_for(section.agent), section.system_envs)


def _checked(
    place: str, name: str, command: Sequence[str], environment: Mapping[str, str], remedy: str, seconds: float
) -> Iterator[Fault]:
    """Yield the fault of an agent whose process cannot load it."""
    try:
        done = subprocess.run(
            [*command, CHECK],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield Fault(
            place,
            f"'{name}' was not imported after {seconds:g} s",
            "fix the module, or raise deadlines.start",
            "timed_out",
        )
        return
    if done.returncode:
        said = f"{done.stdout.strip()} {done.stderr.strip()}".strip()[-KEPT_CHARACTERS:]
        yield Fault(
            place, f"'{name}' cannot be used: {said or f'it ended with status {done.returncode}'}", remedy, "failed"
        )


def _command_faults(place: str, command: tuple[str, ...], environment: Mapping[str, str]) -> Iterator[Fault]:
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        yield Fault(
            place,
            f"'{command[0]}' is not found on this machine",
            "name a program that is on the PATH, or give its path",
            "not_found",
        )
