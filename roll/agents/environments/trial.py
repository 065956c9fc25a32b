"""Resets every environment once before the run starts its roles, so that faults are reported early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from roll.agents.environments.base import Observation
from roll.agents.environments.process import EnvironmentProcess
from roll.config.derived.environment_roles import environment_of
from roll.config.schema.environments import EnvironmentConfig
from roll.errors import ConfigError, EnvironmentFailed, Fault
from roll.hosted.process import HostedProcessFailed

TRIAL_SEED = 0
ProblemOf = Callable[[Observation], str]


async def try_environments(
    sections: Mapping[str, EnvironmentConfig],
    firsts: Mapping[str, Mapping[str, Any]],
    start_seconds: float,
    problem_of: ProblemOf,
) -> list[Fault]:
    """Import the environment and the tools of every domain, and reset the environment on a row.

    Args:
        sections: configuration of the environments, by domain.
        firsts: one row of each domain that has rows. The environments of other domains are only imported.
        start_seconds: deadline for a process to import its environment.
        problem_of: returns the reason why the run's model cannot accept a first observation, or an empty string.

    Returns:
        The faults of all domains.
    """
    found = await asyncio.gather(
        *(_domain(name, section, firsts.get(name), start_seconds, problem_of) for name, section in sections.items())
    )
    return [fault for faults in found for fault in faults]


async def _domain(
    domain: str, section: EnvironmentConfig, row: Mapping[str, Any] | None, start_seconds: float, problem_of: ProblemOf
) -> list[Fault]:
    place, process = f"environments.{domain}", EnvironmentProcess(domain, section, start_seconds)
    tried = f"'{environment_of(domain, section)}', reset on the first row of its domain,"
    try:
        await process.start()
        problem = "" if row is None else problem_of(await process.open(0, row, TRIAL_SEED))
        remedy = "fix the value that reset returns, or raise prompt_length if it is too long"
        unfit = f"{tried} returns an observation that the model cannot accept: {problem}"
        return [Fault(f"{place}.environment", unfit, remedy)] if problem else []
    except ConfigError as error:
        return list(error.faults)
    except HostedProcessFailed as error:
        return [Fault(place, str(error), "fix the module of the environment, or raise deadlines.start")]
    except EnvironmentFailed as failed:
        problem = f"{tried} fails: {failed}"
        columns = f"the row has the columns {', '.join(map(str, row or ()))}"
        late = f"make it faster, or raise {place}.step_timeout"
        return [
            Fault(
                f"{place}.environment", problem, late if failed.reason == "timed_out" else f"fix the class; {columns}"
            )
        ]
    finally:
        await process.close()
