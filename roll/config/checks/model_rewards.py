"""Checks the keys of rewards that come from a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from roll.config.derived.placement import judged_in_turn, model_roles
from roll.config.derived.reward_roles import PREFIX, model_reward, names_file, reward_roles
from roll.config.schema.model_rewards import JUDGE, MODEL_REWARDS, ModelRewardKeys
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RewardConfig, RewardModelRole
from roll.config.shipped import judge_templates
from roll.errors import Fault
from roll.registry import nearest

SERVED = (
    "model_args",
    "strategy_args",
    "device_mapping",
    "template",
    "world_size",
    "max_tokens_per_microbatch",
    "infer_batch_size",
)
READ = {
    "api": {"judge_model_type", "judge_prompt", "judge_pattern", "judge_max_score", "generating_args"}
    | {key for key in ModelRewardKeys.model_fields if key.startswith("judge_")},
    "inference": {*SERVED, "generating_args", "judge_model_type", "judge_prompt", "judge_pattern", "judge_max_score"},
    "scorer": {*SERVED},
}
"""By kind of reward model: the keys that it reads, apart from those that every reward reads."""
OF_FUNCTIONS = (
    "reward_args",
    "timeout",
    "memory_gib",
    "max_processes",
    "world_size",
    "group",
    "concurrency",
    "normalise",
)
SPECIAL = {*ModelRewardKeys.model_fields, *OF_FUNCTIONS}
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
                yield Fault(f"{where}.parts.{name}", problem, "make it the reward of a separate domain, without parts")
    for name, role in reward_roles(config).items():
        yield from _role(name, role)
    yield from _turns(config)


def _unread(where: str, reward: RewardConfig, source: str, name: str) -> Iterator[Fault]:
    # A resolved configuration contains every key, so keys with their default values do not count.
    usual = {key: field.get_default(call_default_factory=True) for key, field in RewardConfig.model_fields.items()}
    given = {key for key in reward.model_fields_set if getattr(reward, key) != usual[key]}
    for key in sorted(given & SPECIAL - READ.get(source, {*OF_FUNCTIONS})):
        if source == "function":
            remedy = f"remove it, or set reward to {' or '.join(MODEL_REWARDS)}"
            yield Fault(f"{where}.{key}", f"set, but the reward '{name}' is a function and does not read it", remedy)
        else:
            by = f" with judge_model_type {source}" if name == JUDGE else ""
            yield Fault(f"{where}.{key}", f"set, but {name}{by} does not read it", "remove it")


def _judge(where: str, reward: RewardConfig) -> Iterator[Fault]:
    if reward.judge_model_type is None:
        yield Fault(
            f"{where}.judge_model_type",
            "missing",
            "set it to inference (a model served in the run) or api (a model at a URL)",
        )
    if reward.judge_pattern is not None:
        try:
            re.compile(reward.judge_pattern)
        except re.error as error:
            problem = f"{reward.judge_pattern!r} is not a regular expression: {error}"
            yield Fault(f"{where}.judge_pattern", problem, r"use Python's syntax, for example 'verdict: (\d+)'")
    prompt = reward.judge_prompt
    if prompt is not None and not names_file(prompt) and prompt not in judge_templates():
        known = judge_templates()
        remedy = f"use one of: {', '.join(known)}; or the path of a text file that contains {{response}}"
        yield Fault(f"{where}.judge_prompt", f"there is no template '{prompt}'{nearest(prompt, list(known))}", remedy)


def _reward_model_keys(where: str, reward: RewardConfig, why: str) -> Iterator[Fault]:
    if reward.strategy_args is None:
        yield Fault(
            f"{where}.strategy_args", f"missing, but {why}", "add strategy_args with strategy_name vllm or hf_infer"
        )
    if reward.model_args is None or reward.model_args.model_name_or_path is None:
        place = f"{where}.model_args.model_name_or_path"
        yield Fault(place, f"missing, but {why}", "set it to the model's folder or Hub name")


def _api(where: str, reward: RewardConfig) -> Iterator[Fault]:
    if reward.judge_model_name is None:
        yield Fault(f"{where}.judge_model_name", "missing", "set it to the model's name at judge_api_url")
    if reward.judge_api_url is None:
        yield Fault(
            f"{where}.judge_api_url",
            "missing",
            "set it to the base URL of the API, for example http://localhost:8000/v1",
        )
    else:
        yield from _url(f"{where}.judge_api_url", reward.judge_api_url)
    key = reward.judge_api_key_env
    # The wrong value may be the secret key itself, so it is not shown.
    if key is not None and not VARIABLE.fullmatch(key):
        remedy = (
            "export the API key in an environment variable, and set this to the variable's name, for example "
            "JUDGE_API_KEY"
        )
        yield Fault(f"{where}.judge_api_key_env", "the value is not the name of an environment variable", remedy)


def _url(place: str, url: str) -> Iterator[Fault]:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        yield Fault(
            place, f"'{url}' is not a URL", "set it to the base URL of the API, for example http://localhost:8000/v1"
        )
        return
    if parts.username or parts.password:
        yield Fault(
            place,
            "the URL contains a user name or a password",
            "remove them; judge_api_key_env names a variable with the key",
        )
    elif not usable:
        remedy = "set it to the base URL of the API, for example http://localhost:8000/v1"
        yield Fault(place, f"'{url}' is not an http or https URL", remedy)


def _role(name: str, role: RewardModelRole) -> Iterator[Fault]:
    if role.model_args.lora_target:
        yield Fault(
            f"{name}.model_args.lora_target",
            f"'{role.model_args.lora_target}', but the model is not trained",
            "remove it",
        )


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
        )
