"""Checks the keys of environments against each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll.config.derived.environment_roles import ENVIRONMENTS, MOST_STEPS, TOOL_USE, environment_of, own_tasks
from roll.config.derived.placement import judged_in_turn
from roll.config.schema.environments import AgentConfig, EnvironmentConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import Fault
from roll.registry import nearest


def environment_key_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of the keys of environments, and of keys that cannot be combined with environments."""
    if not config.rewards and not config.environments:
        yield Fault(
            "rewards",
            "missing, and there are no environments: nothing would be rewarded",
            "add the reward of each domain",
        )
    yield from _lengths(config)
    yield from _rows(config)
    for domain, section in config.environments.items():
        yield from _domain(f"{ENVIRONMENTS}{domain}", section)
        if environment_of(domain, section) == TOOL_USE and domain not in config.rewards:
            problem = f"'{TOOL_USE}' returns no reward of its own, and there is no rewards.{domain}"
            yield Fault(f"{ENVIRONMENTS}{domain}", problem, f"add rewards.{domain}, which scores the policy's answers")
        if domain in config.rewards and config.rewards[domain].tag_included:
            problem = (
                f"set, but the rows of '{domain}' go to {ENVIRONMENTS}{domain}; this reward is only added to the "
                f"environment's"
            )
            yield Fault(f"rewards.{domain}.tag_included", problem, f"move it to {ENVIRONMENTS}{domain}.tag_included")
    if config.environments:
        yield from _other_keys(config)


def _lengths(config: RlvrConfig) -> Iterator[Fault]:
    longest, single = config.sequence_length, config.prompt_length + config.response_length
    if longest is not None and longest < single:
        problem = f"{longest} is less than prompt_length + response_length = {single}: a first turn might not fit"
        yield Fault("sequence_length", problem, f"set it to at least {single}, or lower one of the two")


def _rows(config: RlvrConfig) -> Iterator[Fault]:
    if config.actor_train.data_args is None and not own_tasks(config):
        where, problem = "actor_train.data_args", "missing"
        if config.environments:
            where, problem = (
                f"{ENVIRONMENTS}{next(iter(config.environments))}.rows",
                "missing, and so is actor_train.data_args",
            )
            yield Fault(
                where, problem, "set rows to the number of tasks that the environment generates, or add a data file"
            )
        else:
            yield Fault(where, problem, "add it, with the data file of the prompts (file_name) and its columns")
    sets, places = (config.validation.named_sets(), config.validation.places()) if config.validation else ({}, {})
    for name, one in sets.items():
        for domain in one.rows:
            if domain not in config.environments:
                problem = f"'{domain}' is not a domain of environments{nearest(domain, list(config.environments))}"
                yield Fault(
                    f"{places[name]}.rows.{domain}",
                    problem,
                    "use the name of an environment that generates its own tasks",
                )


def _domain(where: str, section: EnvironmentConfig) -> Iterator[Fault]:
    if section.step_timeout > section.episode_timeout:
        problem = f"{section.step_timeout:g} s is more than episode_timeout, {section.episode_timeout:g} s"
        yield Fault(f"{where}.step_timeout", problem, "lower it, or raise episode_timeout")
    for place, name in enumerate(section.tools):
        if ":" not in name:
            yield Fault(f"{where}.tools[{place}]", f"'{name}' names no function", "write package.module:function")
    for place, server in enumerate(section.mcp):
        yield from _one_of(f"{where}.mcp[{place}]", {"command": server.command, "url": server.url})
        if server.url is not None and not server.url.startswith(("http://", "https://")):
            yield Fault(
                f"{where}.mcp[{place}].url", f"'{server.url}' is not an HTTP address", "write http://host:port/mcp"
            )
        if server.call_timeout >= section.step_timeout:
            problem = (
                f"{server.call_timeout:g} s is not below step_timeout, {section.step_timeout:g} s: a late call would "
                f"end the episode"
            )
            yield Fault(f"{where}.mcp[{place}].call_timeout", problem, "lower it, or raise step_timeout")
    if section.agent is not None:
        yield from _agent(where, section, section.agent)


def _agent(where: str, section: EnvironmentConfig, agent: AgentConfig) -> Iterator[Fault]:
    yield from _one_of(f"{where}.agent", {"command": agent.command, "function": agent.function})
    if agent.function is not None and ":" not in agent.function:
        yield Fault(f"{where}.agent.function", f"'{agent.function}' names no function", "write package.module:function")
    for name in ("tools", "mcp"):
        if getattr(section, name):
            yield Fault(f"{where}.{name}", "set, but an agent calls its tools itself", "remove it, or remove agent")


def _one_of(where: str, keys: Mapping[str, object]) -> Iterator[Fault]:
    """Yield the fault of a block in which not exactly one of two keys is set."""
    if len([value for value in keys.values() if value]) != 1:
        yield Fault(where, f"it needs exactly one of {' and '.join(keys)}", f"set either {' or '.join(keys)}")


def _other_keys(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of keys that only apply to single responses."""
    if config.adv_estimator.traits.needs_greedy:
        problem = f"'{config.adv_estimator}' compares with a greedy response, but an episode in an environment has none"
        yield Fault("adv_estimator", problem, "use another estimator, such as grpo or rloo")
    if config.overlong_buffer:
        problem = "set, but it counts the tokens of one response, and an episode in an environment has several turns"
        yield Fault("overlong_buffer", problem, "remove it; sequence_length and max_turns limit an episode")
    if in_turn := sorted(judged_in_turn(config)):
        problem = (
            f"{' and '.join(in_turn)} would take devices from engines that still have turns of an episode to generate"
        )
        yield Fault(
            f"{in_turn[0]}.device_mapping", problem, "give the model its own devices, or set time_sharing=false"
        )


def environment_warnings(config: RlvrConfig) -> Iterator[str]:
    """Yield warnings about environments that make the engines wait, and about steps that `max_turns` cuts off."""
    episodes = config.rollout_batch_size * config.num_return_sequences_in_group
    for domain, section in config.environments.items():
        room = section.world_size * section.sessions_per_process
        if room < episodes and len(config.domains) == 1:
            wait = f"holds {room} episodes at a time, but a step has {episodes}, so the others wait"
            yield f"{ENVIRONMENTS}{domain}: {wait}; raise sessions_per_process or world_size"
        environment = environment_of(domain, section)
        steps = section.environment_args.get("max_steps", MOST_STEPS[environment]) if environment in MOST_STEPS else 0
        if isinstance(steps, int) and section.max_turns < steps:
            ends = (
                f"episodes end after {section.max_turns} turns, but the environment promises the policy {steps} steps "
                f"(max_steps)"
            )
            yield (
                f"{ENVIRONMENTS}{domain}.max_turns: {ends}; set max_turns={steps}, or lower environment_args.max_steps"
            )
