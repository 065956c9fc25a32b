"""The rewards of a run tried on its own rows."""

from __future__ import annotations

import asyncio

import numpy as np

from roll.config.schema.rlvr import RlvrConfig
from roll.data.prompts import PromptSet
from roll.errors import ConfigError
from roll.rewards.trial import trial
from roll.types import Prompt


def try_rewards(config: RlvrConfig, *sets: PromptSet | None) -> None:
    """Call every reward on the first row of its domain in the first of these sets that has one.

    Raises:
        ConfigError: with what is wrong with any of them.
    """
    firsts: dict[str, Prompt] = {}
    for prompts in filter(None, sets):
        for index, domain in enumerate(prompts.domains):
            found = np.flatnonzero(prompts.domain_index == index)
            if len(found) and domain not in firsts:
                firsts[domain] = prompts.prompt(int(found[0]), 0)
    sections = {
        domain: section.model_copy(update={"system_envs": {**config.system_envs, **section.system_envs}})
        for domain, section in config.rewards.items()
    }
    if faults := asyncio.run(trial(sections, firsts, config.deadlines.start)):
        raise ConfigError(faults)
