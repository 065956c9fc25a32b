"""Checks the keys of rewards that a model gives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from roll.config.derived.placement import judged_in_turn, model_roles, vllm_config
from roll.config.derived.reward_roles import PREFIX, model_reward, names_file, reward_roles
from roll.config.schema.model_rewards import JUDGE, MODEL_REWARDS, ModelRewardKeys
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RewardConfig, ServedConfig
from roll.config.shipped import judge_templates
from roll.errors import Fault
from roll.registry import nearest

SERVED = ("model_args", "strategy_args", "device_mapping", "template", "world_size", "max_tokens_per_microbatch", "infer_batch_size")
READ = {
    "api": {"judge_model_type", "judge_prompt", "judge_pattern", "judge_max_score", "generating_args"}
    | {key for key in ModelRewardKeys.model_fields if key.startswith("judge_")},
    "inference": {*SERVED, "generating_args", "judge_model_type", "judge_prompt", "judge_pattern", "judge_max_score"},
    "scorer": {*SERVED},
}
"""Keys that each kind of reward model reads and that not all rewards read."""
OF_FUNCTIONS = ("reward_args", "timeout", "memory_gib", "max_processes", "world_size", "group", "concurrency", "normalise")
SPECIAL = {*ModelRewardKeys.model_fields, *OF_FUNCTIONS}
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def model_reward_faults(config: RlvrConfig) -> Iterator[Fault]:
    """Return faults of every domain's keys: missing ones, contradictions, and those that its reward does not read."""
    for domain, reward in config.rewards.items():
        where, kind = f"{PREFIX}{domain}", model_reward(domain, reward)
        source = "function" if kind is None else (reward.judge_model_type or "inference") if kind == JUDGE else "scorer"
        yield from _unread(where, reward, source, kind or reward.reward or domain)
        if kind == JUDGE:
            yield from _judge(where, reward)
        if source in ("inference", "scorer"):
            yield from _served_keys(where, reward, f"{kind} serves a model")
        if source == "api":
            yield from _api(where, reward)
        for name, part in reward.parts.items():
            if (part.reward or name) in MODEL_REWARDS:
                problem = f"'{part.reward or name}' is given by a model, and parts are functions"
                yield Fault(f"{where}.parts.{name}", problem, "let it be the reward of a domain of its own, without parts")
    for name, role in reward_roles(config).items():
        yield from _role(name, role)
    yield from _turns(config)


def _unread(where: str, reward: RewardConfig, source: str, name: str) -> Iterator[Fault]:
    # A resolved configuration names every key: those with default values do not count.
    usual = {key: field.get_default(call_default_factory=True) for key, field in RewardConfig.model_fields.items()}
    given = {key for key in reward.model_fields_set if getattr(reward, key) != usual[key]}
    for key in sorted(given & SPECIAL - READ.get(source, {*OF_FUNCTIONS})):
        if source == "function":
            remedy = f"remove it, or set reward to {' or '.join(MODEL_REWARDS)}"
            yield Fault(f"{where}.{key}", f"given, but the reward '{name}' is a function and reads no such key", remedy)
        else:
            by = f" with judge_model_type {source}" if name == JUDGE else ""
            yield Fault(f"{where}.{key}", f"given, but {name}{by} does not read it", "remove it")


def _judge(where: str, reward: RewardConfig) -> Iterator[Fault]:
    if reward.judge_model_type is None:
        yield Fault(f"{where}.judge_model_type", "missing", "set it to inference (a model served in the run) or api (a URL)")
    if reward.judge_pattern is not None:
        try:
            re.compile(reward.judge_pattern)
        except re.error as error:
            problem = f"{reward.judge_pattern!r} is not a regular expression: {error}"
            yield Fault(f"{where}.judge_pattern", problem, r"give one of Python's, for example 'verdict: (\d+)'")
    prompt = reward.judge_prompt
    if prompt is not None and not names_file(prompt) and prompt not in judge_templates():
        known = judge_templates()
        remedy = f"give one of: {', '.join(known)}; or a text file with {{response}} in it"
        yield Fault(f"{where}.judge_prompt", f"there is no template '{prompt}'{nearest(prompt, list(known))}", remedy)


def _served_keys(where: str, reward: RewardConfig, why: str) -> Iterator[Fault]:
    if reward.strategy_args is None:
        yield Fault(f"{where}.strategy_args", f"missing, and {why}", "add strategy_args with strategy_name vllm or hf_infer")
    if reward.model_args is None or reward.model_args.model_name_or_path is None:
        place = f"{where}.model_args.model_name_or_path"
        yield Fault(place, f"missing, and {why}", "name the model: a folder or a Hub name")


def _api(where: str, reward: RewardConfig) -> Iterator[Fault]:
    if reward.judge_model_name is None:
        yield Fault(f"{where}.judge_model_name", "missing", "give the model's name at judge_api_url")
    if reward.judge_api_url is None:
        yield Fault(f"{where}.judge_api_url", "missing", "give the API's base, for example http://localhost:8000/v1")
    else:
        yield from _url(f"{where}.judge_api_url", reward.judge_api_url)
    key = reward.judge_api_key_env
    # The wrong value may be the secret key itself, so it is not shown.
    if key is not None and not VARIABLE.fullmatch(key):
        remedy = "export the key in an environment variable, and give the variable's name: JUDGE_API_KEY"
        yield Fault(f"{where}.judge_api_key_env", "the value is not the name of an environment variable", remedy)


def _url(place: str, url: str) -> Iterator[Fault]:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        yield Fault(place, f"'{url}' is not a URL", "give the API's base, for example http://localhost:8000/v1")
        return
    if parts.username or parts.password:
        yield Fault(place, "the URL holds a user or a password", "remove them; the key comes from judge_api_key_env")
    elif not usable:
        yield Fault(place, f"'{url}' is not an http or https URL", "give the API's base, for example http://localhost:8000/v1")


def _role(name: str, role: ServedConfig) -> Iterator[Fault]:
    if role.model_args.lora_target:
        yield Fault(f"{name}.model_args.lora_target", f"'{role.model_args.lora_target}', but the model does not learn", "remove it")
    engine = vllm_config(role)
    if engine and engine.load_format == "dummy":
        place = f"{name}.strategy_args.strategy_config.load_format"
        yield Fault(place, "'dummy' loads no weights, and no weight sync brings them to this model", "use auto")


def _turns(config: RlvrConfig) -> Iterator[Fault]:
    """Return faults of shared devices. Responses are then judged after the rollout, which must end before anything else begins."""
    devices = {name: set(role.device_mapping or ()) for name, role in model_roles(config).items()}
    reasons = [f"async_generation_ratio is {config.async_generation_ratio:g}"] if config.async_generation_ratio else []
    reasons += ["dynamic_sampling draws further prompts by the verdicts"] if config.dynamic_sampling else []
    for name in sorted(judged_in_turn(config)) if reasons else ():
        others = [other for other in devices if other != name and devices[name] & devices[other]]
        problem = f"shared with {' and '.join(others)}, which it would take turns with once a step's responses are all there"
        yield Fault(
            f"{name}.device_mapping",
            f"{problem}, but {' and '.join(reasons)}",
            "give it devices of its own, set time_sharing=false so that all stay there, or make the run synchronous without "
            "dynamic_sampling",
        )
