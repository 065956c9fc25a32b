"""Checks every row of a reward's domain before the run starts its roles."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from roll.config.schema.roles import RewardConfig
from roll.errors import ConfigError
from roll.hosted.process import HostedProcessFailed
from roll.rewards.parts import parts_of
from roll.rewards.process import RewardProcess
from roll.types import Prompt, RewardOutcome

AT_ONCE = 1000
"""Number of rows that are sent to a reward process together."""
MOST_PROCESSES, ROWS_OF_PROCESS = 8, 1000
"""Largest number of processes that check the rows of a domain, and least number of rows for each if there are several.
"""
MOST_SHAPES = 64
"""Largest number of shapes of rows on which a reward without `check_row` is tried."""


@dataclass(frozen=True)
class RowProblem:
    """A row that a reward cannot use."""

    index: int
    """Index of the row among those of its domain."""
    reward: str
    """Name of the reward."""
    problem: str


async def row_problems(
    domain: str, section: RewardConfig, prompts: Sequence[Prompt], start_seconds: float
) -> list[RowProblem]:
    """Return the rows of a domain that its reward cannot use.

    A reward that declares a `check_row` judges every row. Any other, unless it needs a service, is called with an empty
    response to one row of each shape; if it crashes, all rows of this shape are returned.

    Args:
        start_seconds: deadline for a process to import the domain's functions.

    Raises:
        ConfigError: a reward function cannot be loaded.
        HostedProcessFailed: a process did not start.
    """
    process = RewardProcess(domain, section, start_seconds)
    try:
        traits = await process.start()
        checked = [index for index, one in enumerate(traits) if one.checks_rows]
        called = [index for index, one in enumerate(traits) if not one.checks_rows and not one.needs_service]
        found = await _tried(process, domain, section, prompts, called) if called else []
    finally:
        await process.close()
    return [*(await _checked(domain, section, prompts, checked, start_seconds) if checked else []), *found]


async def _checked(
    domain: str, section: RewardConfig, prompts: Sequence[Prompt], checked: Sequence[int], start_seconds: float
) -> list[RowProblem]:
    """Return the rows that the `check_row` of these parts refuses. Many rows are checked by several processes."""
    count = max(1, min(MOST_PROCESSES, os.cpu_count() or 1, len(prompts) // ROWS_OF_PROCESS))
    bounds = [len(prompts) * number // count for number in range(count + 1)]
    found = await asyncio.gather(
        *(_checked_part(domain, section, prompts, range(*pair), checked, start_seconds) for pair in pairwise(bounds))
    )
    return [problem for of_process in found for problem in of_process]


async def _checked_part(
    domain: str,
    section: RewardConfig,
    prompts: Sequence[Prompt],
    indices: range,
    checked: Sequence[int],
    start_seconds: float,
) -> list[RowProblem]:
    names = [part.reward for part in parts_of(domain, section)]
    process = RewardProcess(domain, section.model_copy(update={"concurrency": 1}), start_seconds, checks_rows=True)
    found = []
    try:
        for begin in range(0, len(indices), AT_ONCE):
            some = indices[begin : begin + AT_ONCE]
            results = await asyncio.gather(*(process.results(prompts[index], [""], checked) for index in some))
            for index, of_parts in zip(some, results, strict=True):
                for part, (result,) in zip(checked, of_parts, strict=True):
                    if result.outcome is not RewardOutcome.SCORED:
                        found.append(RowProblem(index, names[part], result.note))
    finally:
        await process.close()
    return found


async def _tried(
    process: RewardProcess, domain: str, section: RewardConfig, prompts: Sequence[Prompt], called: Sequence[int]
) -> list[RowProblem]:
    """Call these parts for the first row of each shape except the shape of the very first row, which `trial` tries."""
    parts = parts_of(domain, section)
    responses = ["", ""] if any(parts[index].group for index in called) else [""]
    shapes: dict[Any, list[int]] = {}
    for index, prompt in enumerate(prompts):
        shapes.setdefault(value_shape(prompt.row), []).append(index)
    found = []
    for alike in [*shapes.values()][1 : MOST_SHAPES + 1]:
        results = await process.results(prompts[alike[0]], responses, called)
        for part, (result, *_) in zip(called, results, strict=True):
            if result.outcome is RewardOutcome.CRASHED:
                problem = f"called with an empty response to such a row, it fails: {result.note}"
                found += [RowProblem(index, parts[part].reward, problem) for index in alike]
    return found


def value_shape(value: Any) -> Any:
    """Return the shape of a value of a row: the type, whether it is empty, and the shapes of the values of an object by
    key.
    """
    if isinstance(value, Mapping):
        return tuple(_shapes(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number"
    return type(value).__name__, not value and value is not False


def _shapes(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in sorted(values):
        yield key, value_shape(values[key])


async def try_rows(
    sections: Mapping[str, RewardConfig], prompts: Mapping[str, Sequence[Prompt]], start_seconds: float
) -> dict[str, list[RowProblem]]:
    """Return the rows that the rewards of each domain cannot use.

    Domains whose rewards cannot be loaded are left out: `trial` reports them.

    Args:
        sections: configuration of the rewards, by domain.
        prompts: all prompts of each domain that has rows.
        start_seconds: deadline for a process to import the functions of a domain.
    """
    found: dict[str, list[RowProblem]] = {}
    for domain in sections.keys() & prompts.keys():
        try:
            found[domain] = await row_problems(domain, sections[domain], prompts[domain], start_seconds)
        except (ConfigError, HostedProcessFailed):
            continue
    return found
