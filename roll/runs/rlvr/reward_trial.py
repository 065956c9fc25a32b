"""Tries rewards and environments on the rows of a run before anything starts, so that faults are reported early: every
reward function on all rows, every environment on one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from roll.agents.environments.base import Observation
from roll.agents.episodes import ENVIRONMENT
from roll.agents.sight import row_with_files
from roll.config.derived.domains import environment_of
from roll.config.derived.fixed_roles import model_reward
from roll.config.schema.model_rewards import JUDGE
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RewardConfig
from roll.data.chat import TemplateFault
from roll.data.prompts import Joined, Prompts, PromptSet
from roll.data.rows import RowFault, other_reference
from roll.errors import BadInput, ConfigError, DataError, EnvironmentFailed, Fault
from roll.hosted.process import HostedProcessFailed
from roll.rewards.answers import ground_truth
from roll.rewards.judges.judge import answer_pattern
from roll.rewards.passing import Bar, Bars, bars_of, bars_of_judge
from roll.rewards.reward_workers import RewardProcess
from roll.rewards.verdicts import RewardPart, parts_of
from roll.runs.rlvr.environment_trial import agent_faults, environments_with_variables, try_environments
from roll.runs.rlvr.playing import Chat
from roll.runs.rlvr.reward_models import judge_template
from roll.system.event_loop import run_in_loop
from roll.types import NO_VERDICT, Ints, Prompt, RewardOutcome, RewardResult

AT_ONCE = 1000
"""Number of rows that are sent to a reward process together."""
MOST_PROCESSES, ROWS_OF_PROCESS = 8, 1000
"""Largest number of processes that check the rows of a domain, and least number of rows for each if there are several.
"""
MOST_SHAPES = 64
"""Largest number of shapes of rows on which a reward without `check_row` is tried."""
LOG = logging.getLogger(__name__)
REFERENCE_REMEDY = "fix or remove the row"
TRIED = ("", "1")
"""Responses with which functions are tried: many look at the row only if the response has an answer."""
NO_TOKENS = np.zeros(0, np.int32)


def check_rewards(config: RlvrConfig, *sets: Prompts) -> dict[str, Bars]:
    """Check that the rewards can use every row of these sets, and call every reward function on the first row of its
    domain.

    That row is from the first set that contains the domain.

    Returns:
        When a response passes, for every domain.

    Raises:
        DataError: rows cannot be used by their reward: for example, the reference answer is missing. The error names or
            counts all of them.
        ConfigError: rewards cannot be used. The error lists all faults.
        BadInput: both.
    """
    firsts = first_prompts(*sets)
    sections = {
        domain: section.model_copy(update={"system_envs": {**config.system_envs, **section.system_envs}})
        for domain, section in config.rewards.items()
        if model_reward(domain, section) is None
    }
    called = {domain: value_shape(prompt.row) for domain, prompt in firsts.items()}
    bad_rows, refused = _bad_rows(config, sections, [one for many in sets for one in prompt_sets(many)], called)
    tried = {domain: prompt for domain, prompt in firsts.items() if domain not in refused}
    found = run_in_loop(partial(try_rewards, sections, tried, config.deadlines.start))
    if bad_rows or found.faults:
        kind = BadInput if bad_rows and found.faults else DataError if bad_rows else ConfigError
        raise kind(*found.faults, *bad_rows)
    bars = bars_by_domain(config, found.bars)
    for line in bar_notices(config, bars) if config.validation and config.eval_steps else ():
        LOG.warning("%s", line)
    return bars


def bars_by_domain(config: RlvrConfig, of_functions: Mapping[str, Bars]) -> dict[str, Bars]:
    """Return when a response passes, for every domain of a run. `of_functions` are the bars of reward functions."""
    bars = dict(of_functions)
    for domain, section in config.rewards.items():
        if kind := model_reward(domain, section):
            usual = bars_of_judge(answer_pattern(section.judge_pattern, section.judge_max_score, section.judge_prompt))
            bars[domain] = own_bar(section.passes_at) or (usual if kind == JUDGE else ())
    for domain, environment in config.environments.items():
        bars[domain] = own_bar(environment.passes_at) or bars.get(domain) or (Bar(1.0, (f"{ENVIRONMENT}success",)),)
    return bars


def warn_of_unreached(config: RlvrConfig, *sets: Prompts) -> None:
    """Log a warning for each reward whose domain has no task in these sets."""
    reached = {domain for prompts in sets for at, domain in enumerate(prompts.domains) if at in prompts.domain_index}
    for domain, section in config.rewards.items():
        if domain not in reached:
            tags = ", ".join(section.tag_included or (domain,))
            LOG.warning("rewards.%s scores nothing: no row has this domain or one of its tags (%s)", domain, tags)


def bar_notices(config: RlvrConfig, bars: Mapping[str, Bars]) -> list[str]:
    """Return a line for each domain of unexpected accuracy: one with a reward or an environment of the user's own, or
    without any.
    """
    lines = []
    for domain, section in config.environments.items():
        if ":" in environment_of(domain, section) and section.passes_at is None:
            lines.append(
                f"environments.{domain}: an episode passes if {' and '.join(map(str, bars[domain]))}; "
                f"environments.{domain}.passes_at changes that"
            )
    for domain, section in config.rewards.items():
        own = [part.reward for part in parts_of(domain, section) if ":" in part.reward]
        if not bars[domain]:
            lines.append(
                f"rewards.{domain} has no accuracy, only the mean reward avg@n: rewards.{domain}.passes_at gives it one"
            )
        elif own and section.passes_at is None:
            said = " and ".join(map(str, bars[domain]))
            lines.append(
                f"rewards.{domain}: a response passes if {said}, for {', '.join(own)}; rewards.{domain}.passes_at "
                f"changes that"
            )
    return lines


def own_bar(passes_at: float | None) -> Bars:
    """Return the bar of a key `passes_at`; no bars if it is not given."""
    return () if passes_at is None else (Bar(passes_at),)


def _bad_rows(
    config: RlvrConfig, sections: Mapping[str, RewardConfig], sets: Sequence[PromptSet], called: Mapping[str, Any]
) -> tuple[list[Fault], set[str]]:
    """Return the faults of rows that their rewards cannot use, and the domains of these rows. `called` as in
    `try_rows`.
    """
    faults: list[Fault] = []
    domains: set[str] = set()
    for prompts in sets:
        rows = {domain: list(prompts.rows(domain)) for domain in config.rewards if domain in prompts.domains}
        asked = {
            domain: [Prompt(0, NO_TOKENS, "", domain, row) for _, row in rows[domain]]
            for domain in sections
            if rows.get(domain)
        }
        problems = run_in_loop(partial(try_rows, sections, asked, config.deadlines.start, called)) | dict(
            _without_reference(config, rows)
        )
        domains |= {domain for domain, found in problems.items() if found}
        bad = [(rows[domain][one.index][0], _row_fault(one)) for domain, found in problems.items() for one in found]
        faults += prompts.faults(sorted(bad, key=lambda pair: pair[0]))
    return faults, domains


def _row_fault(found: RowProblem) -> RowFault:
    return RowFault(
        f"no reference for '{found.reward}'",
        f"'{found.reward}' cannot use the row: {found.problem}",
        REFERENCE_REMEDY,
        "unfit",
    )


def prompt_sets(prompts: Prompts) -> Iterator[PromptSet]:
    """Yield the sets that consist of rows of files."""
    if isinstance(prompts, PromptSet):
        yield prompts
    for one in prompts.sets if isinstance(prompts, Joined) else ():
        yield from prompt_sets(one)


def check_environments(config: RlvrConfig, chat: Chat | None, *sets: Prompts) -> None:
    """Reset every environment on the first row of its domain, and render its first observation.

    The row is from the first of these sets that contains the domain.

    Raises:
        ConfigError: environments cannot be used. The error lists all faults.
    """
    if chat is None:
        return
    rows, sections = _environment_rows(config, *sets), environments_with_variables(config)
    problem, sees = partial(_problem, chat, config.prompt_length), chat.sight is not None
    faults = run_in_loop(partial(try_environments, sections, rows, config.deadlines.start, problem, sees))
    if faults := [*faults, *agent_faults(sections, config.deadlines.start)]:
        raise ConfigError(*faults)


def _environment_rows(config: RlvrConfig, *sets: Prompts) -> dict[str, Mapping[str, Any]]:
    """Return the first row of each domain with an environment, with the files of its pictures. Raises DataError."""
    rows = dict[str, Mapping[str, Any]]()
    for domain, prompt in _firsts(*sets).items():
        try:
            files = prompt.shown.asked().files if prompt.shown and domain in config.environments else ()
            rows[domain] = row_with_files(prompt.row, files) if files else prompt.row
        except EnvironmentFailed as failed:
            problem, _, remedy = failed.why.partition("; ")
            raise DataError(Fault(prompt.place, problem, remedy, "not_supported")) from failed
    return rows


def _problem(chat: Chat, most: int, first: Observation) -> str:
    """Return the problem with a first observation: not renderable, or above `most` tokens. "" without one."""
    try:
        tokens = len(_first_tokens(chat, first))
    except TemplateFault as fault:
        return f"the chat template refuses its first observation: {fault}"
    return f"its first observation has {tokens} tokens, and prompt_length is {most}" if tokens > most else ""


def _first_tokens(chat: Chat, first: Observation) -> Ints:
    """Return the tokens of a first observation. Raises TemplateFault, or EnvironmentFailed for its pictures."""
    if chat.sight is None:
        return chat.renderer.render(first.messages, first.tools)
    seen = chat.sight.read(first.messages)
    found = chat.sight.tokens(lambda renderer: renderer.render(seen.messages, first.tools), seen.pictures)
    assert found is not None
    return found.token_ids


def first_prompts(*sets: Prompts) -> dict[str, Prompt]:
    """Return the first prompt of each domain, without pictures, from the first of the sets that contains the domain."""
    return {domain: replace(prompt, shown=None) for domain, prompt in _firsts(*sets).items()}


def _firsts(*sets: Prompts) -> dict[str, Prompt]:
    firsts: dict[str, Prompt] = {}
    for prompts in sets:
        for index, domain in enumerate(prompts.domains):
            found = np.flatnonzero(prompts.domain_index == index)
            if len(found) and domain not in firsts:
                firsts[domain] = prompts.prompt(int(found[0]), 0)
    return firsts


def _without_reference(
    config: RlvrConfig, rows: Mapping[str, Sequence[tuple[int, Mapping[str, Any]]]]
) -> Iterator[tuple[str, list[RowProblem]]]:
    """Yield each domain of a judge that needs a reference answer, with the rows of this domain that have none."""
    for domain, section in config.rewards.items():
        if model_reward(domain, section) == JUDGE and judge_template(section.judge_prompt).needs_reference:
            yield (
                domain,
                [
                    RowProblem(at, JUDGE, why)
                    for at, (_, row) in enumerate(rows.get(domain, ()))
                    if (why := _why_none(row))
                ],
            )


def _why_none(row: Mapping[str, Any]) -> str:
    """Return why a row has no usable reference answer; "" if it has one."""
    try:
        ground_truth(row)
    except ValueError as error:
        return f"the judge_prompt has {{reference}}, but {error}"
    return ""


@dataclass(frozen=True)
class RowProblem:
    """A row that a reward cannot use."""

    index: int
    """Index of the row among those of its domain."""
    reward: str
    problem: str


async def row_problems(
    domain: str, section: RewardConfig, prompts: Sequence[Prompt], start_seconds: float, called_shape: Any
) -> list[RowProblem]:
    """Return the rows of a domain that its reward cannot use.

    A reward that declares a `check_row` judges every row. Any other, unless it needs a service, is called with the
    responses `TRIED` to one row of each shape; if it crashes, all rows of this shape are returned.

    Args:
        start_seconds: deadline for a process to import the domain's functions.
        called_shape: shape of the row for which `try_rewards` calls the functions anyway.

    Raises:
        ConfigError: a reward function cannot be loaded.
        HostedProcessFailed: a process did not start.
    """
    process = RewardProcess(domain, section, start_seconds)
    try:
        traits = await process.start()
        checked = [index for index, one in enumerate(traits) if one.checks_rows]
        called = [index for index, one in enumerate(traits) if not one.checks_rows and not one.needs_service]
        found = await _tried(process, domain, section, prompts, called, called_shape) if called else []
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
    process: RewardProcess,
    domain: str,
    section: RewardConfig,
    prompts: Sequence[Prompt],
    called: Sequence[int],
    called_shape: Any,
) -> list[RowProblem]:
    """Call these parts for the first row of each shape except `called_shape`, which `try_rewards` tries."""
    parts = parts_of(domain, section)
    shapes: dict[Any, list[int]] = {}
    for index, prompt in enumerate(prompts):
        shapes.setdefault(value_shape(prompt.row), []).append(index)
    shapes.pop(called_shape, None)
    found = []
    for alike in [*shapes.values()][:MOST_SHAPES]:
        results = await process.results(prompts[alike[0]], TRIED, called)
        for part, of_part in zip(called, results, strict=True):
            tried, result = _worst(of_part)
            if result.outcome is RewardOutcome.CRASHED:
                problem = f"called with {tried} to such a row, it fails: {result.note}"
                found += [RowProblem(index, parts[part].reward, problem) for index in alike]
    return found


def value_shape(value: Any) -> Any:
    """Return the shape of a row's value: type, whether it is empty, and the shapes of an object's values."""
    if isinstance(value, Mapping):
        return tuple(_shapes(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number"
    return type(value).__name__, not value and value is not False


def _shapes(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in sorted(values):
        yield key, value_shape(values[key])


async def try_rows(
    sections: Mapping[str, RewardConfig],
    prompts: Mapping[str, Sequence[Prompt]],
    start_seconds: float,
    called: Mapping[str, Any],
) -> dict[str, list[RowProblem]]:
    """Return the rows that the rewards of each domain cannot use.

    Domains whose rewards cannot be loaded are left out: `try_rewards` reports them.

    Args:
        sections: configuration of the rewards, by domain.
        prompts: all prompts of each domain that has rows.
        start_seconds: deadline for a process to import the functions of a domain.
        called: shape of the row for which `try_rewards` calls the functions of a domain, by domain.
    """
    found: dict[str, list[RowProblem]] = {}
    for domain in sections.keys() & prompts.keys():
        try:
            found[domain] = await row_problems(
                domain, sections[domain], prompts[domain], start_seconds, called.get(domain)
            )
        except (ConfigError, HostedProcessFailed):
            continue
    return found


class Trial(NamedTuple):
    """What a trial of rewards found."""

    faults: list[Fault]
    bars: dict[str, Bars]
    """When a response passes, by domain. Domains whose rewards cannot be loaded are left out."""


async def try_rewards(
    sections: Mapping[str, RewardConfig], firsts: Mapping[str, Prompt], start_seconds: float
) -> Trial:
    """Import the reward functions of every domain, and call each with the responses `TRIED`, except those that need a
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
        *(_reward_faults(name, section, firsts.get(name), start_seconds, bars) for name, section in sections.items())
    )
    return Trial([fault for faults in found for fault in faults], bars)


async def _reward_faults(
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
        results = await process.results(prompt, TRIED, called)
        worst = [(parts[index], *_worst(of_part)) for index, of_part in zip(called, results, strict=True)]
        return [
            _fault(domain, part, tried, result, prompt, section.timeout)
            for part, tried, result in worst
            if result.outcome in NO_VERDICT
        ]
    except ConfigError as error:
        return list(error.faults)
    except HostedProcessFailed as error:
        return [
            Fault(f"rewards.{domain}", str(error), "fix the module of the reward, or raise deadlines.start", "failed")
        ]
    finally:
        await process.close()


def _worst(results: Sequence[RewardResult]) -> tuple[str, RewardResult]:
    """Return the first result of a trial without a verdict, else the first of all, and to which response it is."""
    at = next((at for at, result in enumerate(results) if result.outcome in NO_VERDICT), 0)
    return f"the response '{TRIED[at]}'" if TRIED[at] else "an empty response", results[at]


def _fault(domain: str, part: RewardPart, response: str, result: RewardResult, prompt: Prompt, seconds: float) -> Fault:
    tried = f"'{part.reward}', called with {response} to the first row of its domain,"
    columns = f"the row has the columns {', '.join(map(str, prompt.row))}"
    if other := other_reference(prompt.row):
        columns += f"; data_args.ground_truth={other[0]} would make that its ground_truth"
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
    late = result.outcome is RewardOutcome.TIMED_OUT
    return Fault(f"{part.place}.reward", problem, remedy, "timed_out" if late else "failed")
