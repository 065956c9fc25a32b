"""Tries the rewards and environments of a run on its rows before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from roll.config.derived.reward_roles import model_reward
from roll.config.schema.model_rewards import JUDGE
from roll.config.schema.rlvr import RlvrConfig
from roll.data.chat import TemplateFault
from roll.data.renderers.base import ChatRenderer
from roll.data.tasks import Prompts
from roll.environments.base import Observation
from roll.environments.trial import trial as trial_of_environments
from roll.errors import ConfigError, Fault
from roll.gateway.trial import agent_faults
from roll.pipeline.wire_reward_models import judge_template
from roll.rewards.answers import ground_truth
from roll.rewards.trial import trial
from roll.system.event_loop import run_in_loop
from roll.types import Prompt


def try_rewards(config: RlvrConfig, *sets: Prompts) -> None:
    """Call every reward function on the first row of its domain, from the first of these sets that contains the domain.

    For a judge, check that the row has a reference answer if its template needs one.

    Raises:
        ConfigError: rewards cannot be used. The error lists all faults.
    """
    firsts = first_prompts(*sets)
    sections = {
        domain: section.model_copy(update={"system_envs": {**config.system_envs, **section.system_envs}})
        for domain, section in config.rewards.items()
        if model_reward(domain, section) is None
    }
    if faults := [*run_in_loop(partial(trial, sections, firsts, config.deadlines.start)), *_without_reference(config, firsts)]:
        raise ConfigError(faults)


def try_environments(config: RlvrConfig, renderer: ChatRenderer | None, *sets: Prompts) -> None:
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
    faults = run_in_loop(partial(trial_of_environments, sections, rows, config.deadlines.start, problem))
    if faults := [*faults, *agent_faults(sections, config.deadlines.start)]:
        raise ConfigError(faults)


def _problem(renderer: ChatRenderer, most: int, first: Observation) -> str:
    """Return the problem with a first observation: it cannot be rendered, or has more than `most` tokens. "" without a problem."""
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


def _without_reference(config: RlvrConfig, firsts: Mapping[str, Prompt]) -> Iterator[Fault]:
    for domain, section in config.rewards.items():
        if (
            (prompt := firsts.get(domain)) is None
            or model_reward(domain, section) != JUDGE
            or not judge_template(section.judge_prompt).needs_reference
        ):
            continue
        try:
            ground_truth(prompt.row)
        except ValueError as error:
            problem = f"it needs a reference answer, but the first row of the domain has none that can be used: {error}"
            remedy = "add a column ground_truth or answer to the data, or use a judge_prompt without {reference}"
            yield Fault(f"rewards.{domain}.judge_prompt", problem, remedy)
