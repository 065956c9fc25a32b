"""Tries the rewards and environments of a run on its rows before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from roll.agents.environments.base import Observation
from roll.agents.environments.trial import try_environments
from roll.agents.episodes import ENVIRONMENT
from roll.agents.gateway.trial import agent_faults
from roll.config.derived.reward_roles import model_reward
from roll.config.schema.model_rewards import JUDGE
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RewardConfig
from roll.data.chat import TemplateFault
from roll.data.prompts import PromptSet
from roll.data.renderers.base import ChatRenderer
from roll.data.rows import RowFault
from roll.data.tasks import Joined, Prompts
from roll.errors import BadInput, ConfigError, DataError, Fault
from roll.rewards.answers import ground_truth
from roll.rewards.judges.judging import answer_pattern
from roll.rewards.parts import parts_of
from roll.rewards.passing import Bar, Bars, bars_of_judge
from roll.rewards.row_trial import RowProblem, try_rows
from roll.rewards.trial import try_rewards
from roll.runs.rlvr.reward_models import judge_template
from roll.system.event_loop import run_in_loop
from roll.types import Prompt

LOG = logging.getLogger(__name__)
REFERENCE_REMEDY = "fix or remove the row"
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
    bad_rows, refused = _bad_rows(config, sections, [one for many in sets for one in _prompt_sets(many)])
    tried = {domain: prompt for domain, prompt in firsts.items() if domain not in refused}
    found = run_in_loop(partial(try_rewards, sections, tried, config.deadlines.start))
    if bad_rows or found.faults:
        kind = BadInput if bad_rows and found.faults else DataError if bad_rows else ConfigError
        raise kind([*found.faults, *bad_rows])
    bars = bars_by_domain(config, found.bars)
    for line in bar_notices(config, bars) if config.validation and config.eval_steps else ():
        LOG.warning("%s", line)
    return bars


def bars_by_domain(config: RlvrConfig, of_functions: Mapping[str, Bars]) -> dict[str, Bars]:
    """Return when a response passes, for every domain of a run.

    Args:
        of_functions: the bars of the domains that reward functions score.
    """
    bars = dict(of_functions)
    for domain, section in config.rewards.items():
        if kind := model_reward(domain, section):
            usual = bars_of_judge(answer_pattern(section.judge_pattern, section.judge_max_score, section.judge_prompt))
            bars[domain] = own_bar(section.passes_at) or (usual if kind == JUDGE else ())
    for domain, environment in config.environments.items():
        bars[domain] = own_bar(environment.passes_at) or bars.get(domain) or (Bar(1.0, (f"{ENVIRONMENT}success",)),)
    return bars


def bar_notices(config: RlvrConfig, bars: Mapping[str, Bars]) -> list[str]:
    """Return a line for each domain whose accuracy a user may not expect: a reward of the user's own, or one without an
    accuracy.
    """
    lines = []
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
    config: RlvrConfig, sections: Mapping[str, RewardConfig], sets: Sequence[PromptSet]
) -> tuple[list[Fault], set[str]]:
    """Return the faults of rows that their rewards cannot use, and the domains of these rows."""
    faults: list[Fault] = []
    domains: set[str] = set()
    for prompts in sets:
        rows = {domain: list(prompts.rows(domain)) for domain in config.rewards if domain in prompts.domains}
        asked = {
            domain: [Prompt(0, NO_TOKENS, "", domain, row) for _, row in rows[domain]]
            for domain in sections
            if rows.get(domain)
        }
        problems = run_in_loop(partial(try_rows, sections, asked, config.deadlines.start)) | dict(
            _without_reference(config, rows)
        )
        domains |= {domain for domain, found in problems.items() if found}
        bad = [(rows[domain][one.index][0], _row_fault(one)) for domain, found in problems.items() for one in found]
        faults += prompts.faults(sorted(bad, key=lambda pair: pair[0]))
    return faults, domains


def _row_fault(found: RowProblem) -> RowFault:
    return RowFault(
        f"no reference for '{found.reward}'", f"'{found.reward}' cannot use the row: {found.problem}", REFERENCE_REMEDY
    )


def _prompt_sets(prompts: Prompts) -> Iterator[PromptSet]:
    """Yield the sets that consist of rows of files."""
    if isinstance(prompts, PromptSet):
        yield prompts
    for one in prompts.sets if isinstance(prompts, Joined) else ():
        yield from _prompt_sets(one)


def check_environments(config: RlvrConfig, renderer: ChatRenderer | None, *sets: Prompts) -> None:
    """Reset every environment on the first row of its domain, and render its first observation.

    The row is from the first of these sets that contains the domain.

    Raises:
        ConfigError: environments cannot be used. The error lists all faults.
    """
    if renderer is None:
        return
    rows = {domain: prompt.row for domain, prompt in first_prompts(*sets).items()}
    sections = {
        domain: section.model_copy(update={"system_envs": {**config.system_envs, **section.system_envs}})
        for domain, section in config.environments.items()
    }
    problem = partial(_problem, renderer, config.prompt_length)
    faults = run_in_loop(partial(try_environments, sections, rows, config.deadlines.start, problem))
    if faults := [*faults, *agent_faults(sections, config.deadlines.start)]:
        raise ConfigError(faults)


def _problem(renderer: ChatRenderer, most: int, first: Observation) -> str:
    """Return the problem with a first observation: it cannot be rendered, or has more than `most` tokens. "" without a
    problem.
    """
    try:
        tokens = len(renderer.render(first.messages, first.tools))
    except TemplateFault as fault:
        return f"the chat template refuses its first observation: {fault}"
    return f"its first observation has {tokens} tokens, and prompt_length is {most}" if tokens > most else ""


def first_prompts(*sets: Prompts) -> dict[str, Prompt]:
    """Return the first prompt of each domain, from the first of the sets that contains the domain."""
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
