"""Every environment is reset once before anything starts: what is wrong with it is said then, not when all roles have started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from roll.config.schema.environments import EnvironmentConfig
from roll.environments.process import EnvironmentProcess, EnvironmentProcessFailed
from roll.errors import ConfigError, EnvironmentFailed, Fault

TRIAL_SEED = 0


async def trial(sections: Mapping[str, EnvironmentConfig], firsts: Mapping[str, Mapping[str, Any]], start_seconds: float) -> list[Fault]:
    """Import the environment and the tools of every domain, and reset the environment on a row.

    Args:
        sections: by domain.
        firsts: a row of each domain that has any; the environments of others are imported alone.
        start_seconds: in which a process must have imported its environment.

    Returns:
        What is wrong with any of them.
    """
    found = await asyncio.gather(*(_domain(name, section, firsts.get(name), start_seconds) for name, section in sections.items()))
    return [fault for faults in found for fault in faults]


async def _domain(domain: str, section: EnvironmentConfig, row: Mapping[str, Any] | None, start_seconds: float) -> list[Fault]:
    place, process = f"environments.{domain}", EnvironmentProcess(domain, section, start_seconds)
    try:
        await process.start()
        if row is not None:
            await process.open(0, row, TRIAL_SEED)
        return []
    except ConfigError as error:
        return list(error.faults)
    except EnvironmentProcessFailed as error:
        return [Fault(place, str(error), "mend the module of the environment, or raise deadlines.start")]
    except EnvironmentFailed as failed:
        problem = f"'{section.environment or domain}', reset on the first row of its domain, fails: {failed}"
        columns = f"the row has the columns {', '.join(map(str, row or ()))}"
        late = f"make it faster, or raise {place}.step_timeout"
        return [Fault(f"{place}.environment", problem, late if failed.reason == "timed_out" else f"mend the class; {columns}")]
    finally:
        await process.close()
