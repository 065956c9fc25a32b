"""Checks the keys of domains: their rewards, the models that compute them, their filters and their environments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from urllib.parse import urlsplit

from roll.config.derived.domains import (
    COMMAND_SECONDS,
    ENVIRONMENTS,
    MOST_STEPS,
    READ_TASK,
    SHELL,
    STEP_MARGIN,
    TOOL_USE,
    VERIFY_SECONDS,
    environment_of,
    named_rewards,
    own_tasks,
    sandbox_faults,
)
from roll.config.derived.fixed_roles import PREFIX, model_reward, names_file
from roll.config.derived.placement import judged_in_turn, model_roles
from roll.config.load.on_disk import held_out_data
from roll.config.schema.environments import AgentConfig, ContainerConfig, EnvironmentConfig
from roll.config.schema.model_rewards import JUDGE, MODEL_REWARDS, ModelRewardKeys
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import QueryFilterConfig, RewardConfig
from roll.config.shipped import judge_templates, known_environments, known_rewards
from roll.errors import Fault
from roll.registry import ENVIRONMENT_GROUP, REWARD_GROUP, nearest, registered

SERVED = (
    "model_args", "strategy_args", "device_mapping", "template", "world_size", "max_tokens_per_microbatch",
    "infer_batch_size",
)  # fmt: skip
READ = {
    "api": {"judge_model_type", "judge_prompt", "judge_pattern", "judge_max_score", "generating_args"}
    | {key for key in ModelRewardKeys.model_fields if key.startswith("judge_")},
    "inference": {*SERVED, "generating_args", "judge_model_type", "judge_prompt", "judge_pattern", "judge_max_score"}
    | {"judge_sees_pictures"},
    "scorer": {*SERVED},
}
"""By kind of reward model: the keys that it reads, apart from those that every reward reads."""
OF_FUNCTIONS = (
    "reward_args", "timeout", "memory_gib", "max_processes", "world_size", "group", "concurrency", "normalise",
)  # fmt: skip
SPECIAL = {*ModelRewardKeys.model_fields, *OF_FUNCTIONS}
Given = tuple[str, str | None]
"""A key and its value."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
BOUNDS_READ = {"no_filter": (), "mean_filter": ("threshold_down", "threshold_up"), "std_filter": ("std_threshold",)}
"""By type of filter: the bounds that it reads."""


def domain_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of rewards, of the models that compute them, of filters and of environments."""
    yield from _rewards(config)
    yield from _tags(config)
    yield from _unreached(config)
    yield from model_reward_faults(config)
    yield from filter_faults(config)
    yield from environment_key_faults(config)


def _rewards(config: RlvrConfig) -> Iterator[Fault]:
    known = [*known_rewards(), *MODEL_REWARDS]
    for where, name in named_rewards(config.rewards).items():
        if ":" not in name and name not in known:
            close = [*known, *(entry.name for entry in registered(REWARD_GROUP))]
            remedy = f"set reward to one of: {_listed(known, REWARD_GROUP)}; or to your own, as package.module:function"
            if own := _with_colon(name):
                close, remedy = [], f"write {own}, for a function of a file in the working directory"
            yield Fault(where, f"there is no reward function '{name}'{nearest(name, close)}", remedy, "unknown_name")
    yield from sandbox_faults(config.rewards)
    for domain, reward in config.rewards.items():
        for key in ("reward", "reward_args", "group", "failed_value"):
            if reward.parts and key in reward.model_fields_set and getattr(reward, key) is not None:
                problem = f"{getattr(reward, key)!r}, but rewards.{domain}.parts replace it"
                yield Fault(
                    f"rewards.{domain}.{key}", problem, "move it into one of the parts, or remove it", "exclusive"
                )
        if reward.normalise == "group" and not reward.parts:
            remedy = "add parts, or remove it; adv_estimator normalises a single reward"
            yield Fault(f"rewards.{domain}.normalise", "'group', but the reward has no parts", remedy, "owner_missing")


def _with_colon(name: str) -> str:
    """Return `module:function` for a file in the working directory that is named without a colon; "" for none."""
    module, _, function = name.partition(".")
    return f"{module}:{function or 'FUNCTION'}" if Path(f"{module}.py").is_file() else ""


def _listed(known: Sequence[str], group: str) -> str:
    return ", ".join([*known, *map(str, registered(group))])


def _tags(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of tags that several domains claim, and of sampling shares for unknown domains."""
    known, rows = config.domains, config.actor_train.data_args
    tags = {domain: set(section.tag_included or (domain,)) for domain, section in known.items()}
    places = {domain: f"{'environments' if domain in config.environments else 'rewards'}.{domain}" for domain in known}
    for first, second in combinations(tags, 2):
        for tag in sorted(tags[first] & tags[second]):
            problem = f"'{tag}' already belongs to {places[first]}"
            yield Fault(f"{places[second]}.tag_included", problem, "list each tag in one domain", "duplicate")
    for domain in (rows and rows.domain_interleave_probs) or {}:
        if domain not in known:
            where = f"actor_train.data_args.domain_interleave_probs.{domain}"
            problem = f"'{domain}' is not a domain of this run{nearest(domain, list(known))}"
            yield Fault(where, problem, f"use one of: {', '.join(known)}", "unknown_name")


def _unreached(config: RlvrConfig) -> Iterator[Fault]:
    """Yield the rewards of domains that have no task, because no file is read and they have no environment."""
    files = [config.actor_train.data_args, *held_out_data(config).values()]
    if any(files) or config.replay_from is not None:
        return  # which domains the rows have is found when they are read
    for domain in config.rewards:
        if domain not in config.environments:
            known = list(config.environments)
            problem = f"no environment is named '{domain}'{nearest(domain, known)}, and no file has rows for it"
            remedy = f"name it like its environment ({', '.join(known)}), or remove it"
            yield Fault(f"rewards.{domain}", problem, remedy, "owner_missing")


def model_reward_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of every domain's keys: missing keys, contradictions, and keys that its reward does not read."""
    for domain, reward in config.rewards.items():
        where, kind = f"{PREFIX}{domain}", model_reward(domain, reward)
        source = "function" if kind is None else (reward.judge_model_type or "inference") if kind == JUDGE else "scorer"
        yield from _unread(where, reward, source, kind or reward.reward or domain)
        if kind == JUDGE:
            yield from _judge(where, reward)
        if source in ("inference", "scorer"):
            yield from _reward_model_keys(where, reward, f"{kind} serves a model")
        if source == "api":
            yield from _api(where, reward)
        for name, part in reward.parts.items():
            if (part.reward or name) in MODEL_REWARDS:
                problem = f"'{part.reward or name}' is scored by a model, but parts must be functions"
                yield Fault(
                    f"{where}.parts.{name}",
                    problem,
                    "make it the reward of a separate domain, without parts",
                    "not_supported",
                )
    yield from _turns(config)


def _unread(where: str, reward: RewardConfig, source: str, name: str) -> Iterator[Fault]:
    # A resolved configuration contains every key, so keys with their default values do not count.
    usual = {key: field.get_default(call_default_factory=True) for key, field in RewardConfig.model_fields.items()}
    given = {key for key in reward.model_fields_set if getattr(reward, key) != usual[key]}
    for key in sorted(given & SPECIAL - READ.get(source, {*OF_FUNCTIONS})):
        if source == "function":
            remedy = f"remove it, or set reward to {' or '.join(MODEL_REWARDS)}"
            yield Fault(
                f"{where}.{key}", f"set, but the reward '{name}' is a function and does not read it", remedy, "unread"
            )
        else:
            by = f" with judge_model_type {source}" if name == JUDGE else ""
            yield Fault(f"{where}.{key}", f"set, but {name}{by} does not read it", "remove it", "unread")


def _judge(where: str, reward: RewardConfig) -> Iterator[Fault]:
    if reward.judge_model_type is None:
        remedy = "set it to inference (a model served in the run) or api (a model at a URL)"
        yield Fault(f"{where}.judge_model_type", "missing", remedy, "missing")
    if reward.judge_pattern is not None:
        try:
            re.compile(reward.judge_pattern)
        except re.error as error:
            problem = f"{reward.judge_pattern!r} is not a regular expression: {error}"
            yield Fault(
                f"{where}.judge_pattern", problem, r"use Python's syntax, for example 'verdict: (\d+)'", "malformed"
            )
    prompt = reward.judge_prompt
    if prompt is not None and not names_file(prompt) and prompt not in judge_templates():
        known = judge_templates()
        remedy = f"use one of: {', '.join(known)}; or the path of a text file that contains {{response}}"
        yield Fault(
            f"{where}.judge_prompt",
            f"there is no template '{prompt}'{nearest(prompt, list(known))}",
            remedy,
            "unknown_name",
        )


def _reward_model_keys(where: str, reward: RewardConfig, why: str) -> Iterator[Fault]:
    if reward.strategy_args is None:
        yield Fault(
            f"{where}.strategy_args",
            f"missing, but {why}",
            "add strategy_args with strategy_name vllm or hf_infer",
            "missing",
        )
    if reward.model_args is None or reward.model_args.model_name_or_path is None:
        place = f"{where}.model_args.model_name_or_path"
        yield Fault(place, f"missing, but {why}", "set it to the model's folder or Hub name", "missing")


def _api(where: str, reward: RewardConfig) -> Iterator[Fault]:
    model, url = ("judge_model_name", reward.judge_model_name), ("judge_api_url", reward.judge_api_url)
    yield from api_faults(where, model, url, ("judge_api_key_env", reward.judge_api_key_env), "JUDGE_API_KEY")


def api_faults(where: str, model: Given, url: Given, variable: Given, example: str) -> Iterator[Fault]:
    """Yield faults of the keys of a model behind a URL. `example` is a name of a variable with an API key."""
    if model[1] is None:
        yield Fault(f"{where}.{model[0]}", "missing", f"set it to the model's name at {url[0]}", "missing")
    if url[1] is None:
        remedy = "set it to the base URL of the API, for example http://localhost:8000/v1"
        yield Fault(f"{where}.{url[0]}", "missing", remedy, "missing")
    else:
        yield from api_url_faults(f"{where}.{url[0]}", url[1], variable[0])
    # The wrong value may be the secret key itself, so it is not shown.
    if variable[1] is not None and not VARIABLE.fullmatch(variable[1]):
        remedy = f"export the API key in an environment variable, and set this to its name, such as {example}"
        problem = "the value is not the name of an environment variable"
        yield Fault(f"{where}.{variable[0]}", problem, remedy, "malformed")


def api_url_faults(place: str, url: str, key: str) -> Iterator[Fault]:
    """Yield the fault of a URL that is none of an API. `key` is the key that names a variable with the API key."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        yield Fault(
            place,
            f"'{url}' is not a URL",
            "set it to the base URL of the API, for example http://localhost:8000/v1",
            "malformed",
        )
        return
    if parts.username or parts.password:
        problem = "the URL contains a user name or a password"
        yield Fault(place, problem, f"remove them; {key} names a variable with the key", "not_allowed")
    elif not usable:
        remedy = "set it to the base URL of the API, for example http://localhost:8000/v1"
        yield Fault(place, f"'{url}' is not an http or https URL", remedy, "malformed")


def _turns(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of reward models that take turns with other roles on their devices.

    They score once all responses of a step are generated, which does not fit asynchronous runs and dynamic sampling.
    """
    devices = {name: set(role.device_mapping or ()) for name, role in model_roles(config).items()}
    reasons = [f"async_generation_ratio is {config.async_generation_ratio:g}"] if config.async_generation_ratio else []
    reasons += ["dynamic_sampling needs the scores to choose further prompts"] if config.dynamic_sampling else []
    for name in sorted(judged_in_turn(config)) if reasons else ():
        others = [other for other in devices if other != name and devices[name] & devices[other]]
        problem = (
            f"shared with {' and '.join(others)}, so it could only score once all responses of a step are generated"
        )
        yield Fault(
            f"{name}.device_mapping",
            f"{problem}, but {' and '.join(reasons)}",
            "give it devices of its own, set time_sharing=false so that all roles stay on the devices, or make the run "
            "synchronous without dynamic_sampling",
            "contradiction",
        )


def environment_key_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of the keys of environments, and of keys that cannot be combined with environments."""
    if not config.rewards and not config.environments:
        problem = "missing, and there are no environments: nothing would be rewarded"
        yield Fault("rewards", problem, "add the reward of each domain", "missing")
    yield from _lengths(config)
    yield from _rows(config)
    for domain, section in config.environments.items():
        yield from _unknown_environment(f"{ENVIRONMENTS}{domain}", environment_of(domain, section))
        yield from _domain(f"{ENVIRONMENTS}{domain}", section)
        yield from _environment_name(domain, section)
        yield from _containers(f"{ENVIRONMENTS}{domain}", section, environment_of(domain, section))
        reports, environment = section.agent is not None and section.agent.gives_reward, environment_of(domain, section)
        if reports and environment != TOOL_USE:
            problem = f"'{environment}', but the agent gives the reward of its episodes"
            remedy = f"set it to {TOOL_USE}, or let the environment give the reward"
            yield Fault(f"{ENVIRONMENTS}{domain}.environment", problem, remedy, "exclusive")
        if environment == TOOL_USE and domain not in config.rewards and not reports:
            problem = f"'{TOOL_USE}' returns no reward of its own, and there is no rewards.{domain}"
            yield Fault(
                f"{ENVIRONMENTS}{domain}",
                problem,
                f"add rewards.{domain}, which scores the policy's answers",
                "missing",
            )
        if domain in config.rewards and config.rewards[domain].tag_included:
            problem = (
                f"set, but the rows of '{domain}' go to {ENVIRONMENTS}{domain}; this reward is only added to the "
                f"environment's"
            )
            yield Fault(
                f"rewards.{domain}.tag_included",
                problem,
                f"move it to {ENVIRONMENTS}{domain}.tag_included",
                "misplaced",
            )
    if config.environments:
        yield from _other_keys(config)


def _containers(where: str, section: EnvironmentConfig, environment: str) -> Iterator[Fault]:
    """Yield faults of containers that could not have what they may use, and of deadlines that would break episodes."""
    memory = section.container.memory_gib
    if environment == SHELL and memory > section.memory_gib:
        problem = f"{memory:g} GiB, but {where}.memory_gib is {section.memory_gib:g}, which its processes inherit"
        yield Fault(f"{where}.container.memory_gib", problem, f"raise {where}.memory_gib to {memory:g}", "too_large")
    usual = ContainerConfig.model_validate({})
    if section.image is None and environment != SHELL and section.container != usual:
        problem = "set, but there is no image, so the environment starts no container"
        yield Fault(f"{where}.container", problem, "set image as well, or remove it", "owner_missing")
    deadlines = {"command_seconds": COMMAND_SECONDS, "verify_seconds": VERIFY_SECONDS}
    given = [section.environment_args.get(key, usual) for key, usual in deadlines.items()]
    if environment != SHELL or not all(isinstance(one, int | float) for one in given):
        return
    if section.step_timeout <= (least := sum(given) + STEP_MARGIN):
        problem = (
            f"{section.step_timeout:g} s, but a step may take {least:g} s (command_seconds, verify_seconds, and "
            f"{STEP_MARGIN:g} s to start a container): a slow command would break the episode"
        )
        remedy = f"raise it above that, for example to {least + 10:g}, or lower them in {where}.environment_args"
        yield Fault(f"{where}.step_timeout", problem, remedy, "too_small")


def _unknown_environment(where: str, name: str) -> Iterator[Fault]:
    known = known_environments()
    if ":" not in name and name not in known:
        close = [*known, *(entry.name for entry in registered(ENVIRONMENT_GROUP))]
        problem = f"no environment is named '{name}'{nearest(name, close)}"
        remedy = f"set it to one of: {_listed(known, ENVIRONMENT_GROUP)}; or to your own class, as package.module:Class"
        yield Fault(f"{where}.environment", problem, remedy, "unknown_name")


def _lengths(config: RlvrConfig) -> Iterator[Fault]:
    longest, single = config.sequence_length, config.prompt_length + config.response_length
    if longest is not None and longest < single:
        problem = f"{longest} is less than prompt_length + response_length = {single}: a first turn might not fit"
        yield Fault("sequence_length", problem, f"set it to at least {single}, or lower one of the two", "too_small")


def _rows(config: RlvrConfig) -> Iterator[Fault]:
    if config.actor_train.data_args is None and not own_tasks(config):
        where, problem = "actor_train.data_args", "missing"
        if config.environments:
            where, problem = (
                f"{ENVIRONMENTS}{next(iter(config.environments))}.rows",
                "missing, and so is actor_train.data_args",
            )
            yield Fault(
                where,
                problem,
                "set rows to the number of tasks that the environment generates, or add a data file",
                "missing",
            )
        else:
            yield Fault(
                where, problem, "add it, with the data file of the prompts (file_name) and its columns", "missing"
            )
    sets, places = (config.validation.named_sets(), config.validation.places()) if config.validation else ({}, {})
    for name, one in sets.items():
        for domain in one.rows:
            if domain not in config.environments:
                problem = f"'{domain}' is not a domain of environments{nearest(domain, list(config.environments))}"
                remedy = "use the name of an environment that generates its own tasks"
                yield Fault(f"{places[name]}.rows.{domain}", problem, remedy, "unknown_name")
            else:
                yield from _taskless(f"{places[name]}.rows.{domain}", domain, config.environments[domain])
    has_files = config.actor_train.data_args is not None or any(one.data_args for one in sets.values())
    for domain, section in config.environments.items():
        where = f"{ENVIRONMENTS}{domain}"
        if section.rows is not None:
            yield from _taskless(f"{where}.rows", domain, section)
        if section.tag_included is not None and not has_files:
            problem = "set, but it assigns rows of data files, and the run has none: its tasks are made by `rows`"
            yield Fault(f"{where}.tag_included", problem, "remove it, or add a data file", "no_effect")


def _taskless(where: str, domain: str, section: EnvironmentConfig) -> Iterator[Fault]:
    """Yield the fault of generated rows for an environment that reads its task from the row."""
    if (environment := environment_of(domain, section)) in READ_TASK:
        problem = f"set, but '{environment}' reads its task from the row, and generated rows have nothing but a seed"
        remedy = "remove it, and give the tasks in a data file, or name an environment that makes tasks of its own"
        yield Fault(where, problem, remedy, "contradiction")


def _environment_name(domain: str, section: EnvironmentConfig) -> Iterator[Fault]:
    """Yield a fault if the environment is neither built in nor the user's own."""
    name, known = environment_of(domain, section), known_environments()
    if ":" not in name and name not in known:
        where = f"{ENVIRONMENTS}{domain}" + (".environment" if section.environment is not None else "")
        problem = f"there is no environment '{name}'{nearest(name, known)}"
        remedy = f"set environment to one of: {', '.join(known)}; or to your own, as package.module:Class"
        yield Fault(where, problem, remedy, "unknown_name")


def _domain(where: str, section: EnvironmentConfig) -> Iterator[Fault]:
    for place, name in enumerate(section.tools):
        if ":" not in name:
            yield Fault(
                f"{where}.tools[{place}]", f"'{name}' names no function", "write package.module:function", "malformed"
            )
    for place, server in enumerate(section.mcp):
        yield from _one_of(f"{where}.mcp[{place}]", {"command": server.command, "url": server.url})
        if server.url is not None and not server.url.startswith(("http://", "https://")):
            yield Fault(
                f"{where}.mcp[{place}].url",
                f"'{server.url}' is not an HTTP address",
                "write http://host:port/mcp",
                "malformed",
            )
        if server.call_timeout >= section.step_timeout:
            problem = (
                f"{server.call_timeout:g} s is not below step_timeout, {section.step_timeout:g} s: a late call would "
                f"end the episode"
            )
            yield Fault(f"{where}.mcp[{place}].call_timeout", problem, "lower it, or raise step_timeout", "not_below")
    if section.agent is not None:
        yield from _agent(where, section, section.agent)


def _agent(where: str, section: EnvironmentConfig, agent: AgentConfig) -> Iterator[Fault]:
    whose = {"command": agent.command, "function": agent.function, "verifiers": agent.verifiers}
    yield from _one_of(f"{where}.agent", whose)
    if agent.function is not None and ":" not in agent.function:
        yield Fault(
            f"{where}.agent.function",
            f"'{agent.function}' names no function",
            "write package.module:function",
            "malformed",
        )
    for name in ("tools", "mcp"):
        if getattr(section, name):
            yield Fault(
                f"{where}.{name}", "set, but an agent calls its tools itself", "remove it, or remove agent", "exclusive"
            )


def _one_of(where: str, keys: Mapping[str, object]) -> Iterator[Fault]:
    """Yield the fault of a block in which not exactly one of several keys is set."""
    if len([value for value in keys.values() if value]) != 1:
        *some, last = keys
        named = f"{', '.join(some)} {{}} {last}"
        yield Fault(where, f"it needs exactly one of {named.format('and')}", f"set {named.format('or')}", "exclusive")


def _other_keys(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of keys that only apply to single responses."""
    if config.adv_estimator.traits.needs_greedy:
        problem = f"'{config.adv_estimator}' compares with a greedy response, but an episode in an environment has none"
        yield Fault("adv_estimator", problem, "use another estimator, such as grpo or rloo", "not_supported")
    if config.overlong_buffer:
        problem = "set, but it counts the tokens of one response, and an episode in an environment has several turns"
        yield Fault(
            "overlong_buffer", problem, "remove it; sequence_length and max_turns limit an episode", "not_supported"
        )
    if in_turn := sorted(judged_in_turn(config)):
        problem = (
            f"{' and '.join(in_turn)} would take devices from engines that still have turns of an episode to generate"
        )
        yield Fault(
            f"{in_turn[0]}.device_mapping",
            problem,
            "give the model its own devices, or set time_sharing=false",
            "contradiction",
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


def filter_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of filters without a bound, with one that is not read, that drop all groups, or of groups of one."""
    for domain, reward in config.rewards.items():
        query_filter = reward.query_filter_config
        if query_filter is None:
            continue
        place = f"rewards.{domain}.query_filter_config"
        yield from _bounds(query_filter, f"{place}.filter_args")
        if query_filter.type != "no_filter" and config.num_return_sequences_in_group == 1:
            problem = (
                f"{query_filter.type}, but num_return_sequences_in_group is 1: a filter needs several rewards per "
                f"prompt"
            )
            yield Fault(
                place, problem, "set num_return_sequences_in_group to at least 2, or remove this block", "no_effect"
            )
        yield from _zero_means(query_filter, reward, place)
        high = query_filter.filter_args.threshold_up if query_filter.type == "mean_filter" else None
        if config.adv_estimator.traits.divides_by_mean and high is not None and high <= 0:
            problem = (
                f"{high:g}, but adv_estimator {config.adv_estimator} learns only if a group's mean is above 0: every "
                f"advantage would be 0"
            )
            yield Fault(
                f"{place}.filter_args.threshold_up", problem, "raise it above 0, or change the estimator", "no_effect"
            )


def _zero_means(query_filter: QueryFilterConfig, reward: RewardConfig, place: str) -> Iterator[Fault]:
    """Yield a fault if no group can pass the filter: `normalise: group` makes its mean 0 and bounds its deviation."""
    if reward.normalise != "group":
        return
    bounds, normalised = query_filter.filter_args, f"rewards.{place.split('.')[1]}.normalise is 'group'"
    low, high = bounds.threshold_down, bounds.threshold_up
    if query_filter.type == "mean_filter" and ((low is not None and low >= 0) or (high is not None and high <= 0)):
        problem = f"mean_filter, but {normalised}: the mean reward of every group would be 0, which the bounds exclude"
        yield Fault(place, problem, "use std_filter, set normalise to none, or remove this block", "contradiction")
    largest = sum(abs(part.weight) for part in reward.parts.values())
    if query_filter.type == "std_filter" and bounds.std_threshold is not None and bounds.std_threshold >= largest > 0:
        problem = (
            f"{bounds.std_threshold:g}, but {normalised}: no group's standard deviation would be above {largest:g}, "
            f"the sum of weights"
        )
        yield Fault(
            f"{place}.filter_args.std_threshold",
            problem,
            f"set it below {largest:g}, or set normalise to none",
            "too_large",
        )


def _bounds(query_filter: QueryFilterConfig, place: str) -> Iterator[Fault]:
    bounds = query_filter.filter_args
    given = {key: value for key, value in bounds if value is not None}
    read = BOUNDS_READ[query_filter.type]
    for key in given.keys() - set(read):
        problem = f"{given[key]:g}, but the type {query_filter.type} does not read it"
        yield Fault(f"{place}.{key}", problem, "remove it, or change the type", "unread")
    if read and not given.keys() & set(read):
        yield Fault(place, f"has no bound, but the type is {query_filter.type}", f"set {' or '.join(read)}", "missing")
