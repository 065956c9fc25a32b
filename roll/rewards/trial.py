"""Calls every reward function once before the run starts its roles, so that faults are reported early."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from roll.config.schema.roles import RewardConfig
from roll.errors import ConfigError, Fault
from roll.hosted.process import HostedProcessFailed
from roll.rewards.parts import RewardPart, parts_of
from roll.rewards.passing import Bars, bars_of
from roll.rewards.process import RewardProcess
from roll.types import NO_VERDICT, Prompt, RewardOutcome, RewardResult


class Trial(NamedTuple):
    """What a trial of rewards found."""

    faults: list[Fault]
    bars: dict[str, Bars]
    """When a response passes, by domain. Domains whose rewards cannot be loaded are left out."""


async def try_rewards(
    sections: Mapping[str, RewardConfig], firsts: Mapping[str, Prompt], start_seconds: float
) -> Trial:
    """Import the reward functions of every domain, and call each with an empty response, except those that need a
    service.

    Args:
        sections: configuration of the rewards, by domain.
        firsts: one prompt of each domain that has rows. The functions of other domains are only imported.
        start_seconds: deadline for a process to import its functions.

    Returns:
        The faults of all domains, and when a response passes.
    """
    bars: dict[str, Bars] = {}
    found = await asyncio.gather(
        *(_domain(name, section, firsts.get(name), start_seconds, bars) for name, section in sections.items())
    )
    return Trial([fault for faults in found for fault in faults], bars)


async def _domain(
    domain: str, section: RewardConfig, prompt: Prompt | None, start_seconds: float, bars: dict[str, Bars]
) -> list[Fault]:
    """Return the faults of a domain, and store its bars."""
    parts, process = parts_of(domain, section), RewardProcess(domain, section, start_seconds)
    try:
        traits = await process.start()
        bars[domain] = bars_of(domain, section, traits)
        called = [index for index, one in enumerate(traits) if not one.needs_service]
        if prompt is None or not called:
            return []
        responses = ["", ""] if any(parts[index].group for index in called) else [""]
        results = await process.results(prompt, responses, called)
        return [
            _fault(domain, parts[index], results_of_part[0], prompt, section.timeout)
            for index, results_of_part in zip(called, results, strict=True)
            if results_of_part[0].outcome in NO_VERDICT
        ]
    except ConfigError as error:
        return list(error.faults)
    except HostedProcessFailed as error:
        return [Fault(f"rewards.{domain}", str(error), "fix the module of the reward, or raise deadlines.start")]
    finally:
        await process.close()


def _fault(domain: str, part: RewardPart, result: RewardResult, prompt: Prompt, seconds: float) -> Fault:
    tried = f"'{part.reward}', called with an empty response to the first row of its domain,"
    columns = f"the row has the columns {', '.join(map(str, prompt.row))}"
    problem, remedy = {
        RewardOutcome.CRASHED: (f"{tried} fails: {result.note}", f"fix the function; {columns}"),
        RewardOutcome.TIMED_OUT: (
            f"{tried} returns no verdict within {seconds:g} s",
            f"make it faster, or raise rewards.{domain}.timeout",
        ),
        RewardOutcome.UNAVAILABLE: (
            f"{tried} cannot reach a verdict: {result.note}",
            "provide the service or program that it needs",
        ),
    }[result.outcome]
    return Fault(f"{part.place}.reward", problem, remedy)
