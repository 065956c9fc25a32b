"""Translates ROLL's keys of a domain: for a function to `reward_args`, for a model to the keys of a role. Keys that the
reward does not read are dropped with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roll.config.schema.faults import printable
from roll.config.schema.foreign_names import OF_REWARD_FUNCTIONS, OF_REWARD_MODELS
from roll.config.schema.model_rewards import MODEL_REWARDS
from roll.errors import Fault

NEUTRAL = {"infer_batch_size": 1}
"""Values with which keys are ignored silently; null if not listed. A resolved configuration has every key."""
AS_A_ROLE = ("model_args", "generating_args", "strategy_args", "device_mapping", "infer_batch_size")
"""Keys that a domain with a model has in common with a role."""
STAND_IN = "actor_infer"
"""Role under whose name `AS_A_ROLE` is translated."""
PROMPTS = {"Qwen2.5-7B-Instruct-RLVR-prompt": "same_answer"}
"""Shipped templates by ROLL's `judge_prompt`."""
KEY = (
    "export it in an environment variable of the shell that starts the run, and set judge_api_key_env to the "
    "variable's name"
)

Translated = Callable[[dict[str, Any]], tuple[dict[str, Any], list[str], list[Fault]]]
"""`translate` for a part of a configuration: its values, warnings and faults."""


def translate_model_rewards(rewards: Any, translated: Translated) -> tuple[list[str], list[Fault]]:
    """Translate the domains in place to the keys of the schema. Return warnings and faults."""
    warnings: list[str] = []
    faults: list[Fault] = []
    for domain, block in rewards.items() if isinstance(rewards, dict) else ():
        if not isinstance(block, dict):
            continue
        where = f"rewards.{domain}"
        if (block.get("reward") or domain) in MODEL_REWARDS:
            warnings += _prompt(where, block) + _template(where, block)
            faults += _key(where, block)
            role = {key: block.pop(key) for key in AS_A_ROLE if key in block}
            values, said, wrong = translated({STAND_IN: role})
            block |= values[STAND_IN]
            warnings += [text.replace(STAND_IN, where) for text in said]
            for fault in wrong:
                place, problem, remedy = (
                    part.replace(STAND_IN, where) for part in (fault.place, fault.problem, fault.remedy)
                )
                faults.append(Fault(place, problem, remedy, fault.code))
        else:
            for key in [key for key in OF_REWARD_MODELS if key in block and block[key] != NEUTRAL.get(key)]:
                value = "the key" if key == "judge_api_key" else printable(block[key])
                del block[key]
                warnings.append(
                    f"{where}.{key}: {value} is ignored; the reward does not read it: {OF_REWARD_MODELS[key]}"
                )
    return warnings, faults


def _prompt(where: str, block: dict[str, Any]) -> list[str]:
    name = block.get("judge_prompt")
    if not isinstance(name, str) or name not in PROMPTS:
        return []
    block["judge_prompt"] = PROMPTS[name]
    return [f"{where}.judge_prompt: '{name}' is read as judge_prompt={PROMPTS[name]}; use that instead"]


def _template(where: str, block: dict[str, Any]) -> list[str]:
    """Move the chat template of a model out of its `data_args`, and drop the rest, because a reward has no rows."""
    given = block.pop("data_args", None)
    if not isinstance(given, Mapping):
        return []
    warnings = [
        f"{where}.data_args.{key}: ignored; a reward has no rows of its own" for key in given if key != "template"
    ]
    if "template" in given:
        template = "native" if given["template"] == "qwen3" else given["template"]
        block.setdefault("template", template)
        warnings.append(f"{where}.data_args.template: read as {where}.template={block['template']}; use that instead")
    return warnings


def _key(where: str, block: dict[str, Any]) -> list[Fault]:
    if block.pop("judge_api_key", None) is None:
        return []
    return [
        Fault(
            f"{where}.judge_api_key",
            "the configuration contains the API key itself, and is written to the run folder",
            KEY,
            "not_allowed",
        )
    ]


USE_LOCAL, CODE_URL, REWARD_TYPE, LENGTH = "use_local", "code_url", "reward_type", "response_length_penalty_coef"
KEYS = (USE_LOCAL, CODE_URL, REWARD_TYPE, LENGTH)
SANDBOX = "sandbox"
"""Argument of `code_sandbox` for the place where programs run, such as a server's address."""
SANDBOXED = "programs run on this machine in a sandbox, unlike in ROLL; remove the key"


@dataclass(frozen=True)
class Read:
    """Treatment of a key."""

    argument: str | None
    """Name in `reward_args`, None if the key is dropped."""
    said: str
    """Reason for dropping the key, for the warning; empty if the key is kept."""


def translate_reward_functions(rewards: Any) -> list[str]:
    """Translate the domains in place to the keys of the schema. Return a warning for each key."""
    warnings: list[str] = []
    for domain, block in rewards.items() if isinstance(rewards, dict) else ():
        if not isinstance(block, dict):
            continue
        given = {key: block.pop(key) for key in KEYS if key in block}
        for key, read in _read(str(block.get("reward") or domain), given):
            value, place = given[key], f"rewards.{domain}.{key}"
            if read.argument is None:
                warnings.append(f"{place}: {printable(value)} is ignored; {read.said}")
            elif isinstance(arguments := block.setdefault("reward_args", {}), dict):
                arguments.setdefault(read.argument, value)
                target = f"reward_args.{read.argument}={arguments[read.argument]}"
                warnings.append(f"{place}: {printable(value)} is read as {target}; use that instead")
    return warnings


def judge_as_roll(reward: str, block: dict[str, Any]) -> list[str]:
    """Add to a domain the arguments with which its reward judges as ROLL does, unless set. Return warnings."""
    is_remote = bool(block.get(CODE_URL)) and not block.get(USE_LOCAL)
    meanings = {
        "code_sandbox": {"pays": "all", "tolerance": 1e-5, "block": "last" if is_remote else "first"},
        "crossthinkqa": {"choice": "first_capital"},
    }
    if reward not in meanings or not isinstance(arguments := block.setdefault("reward_args", {}), dict):
        return []
    added = {key: value for key, value in meanings[reward].items() if key not in arguments}
    arguments |= added
    said = [
        f"reward_args.{key}: not set, so it is {value}, as in ROLL; set it explicitly" for key, value in added.items()
    ]
    pays = [f"{CODE_URL}: ROLL pays -1 for a program that fails on a server, roll pays 0"]
    return said + pays * (is_remote and reward == "code_sandbox")


def _read(reward: str, given: dict[str, Any]) -> Iterator[tuple[str, Read]]:
    for key, value in given.items():
        if key == USE_LOCAL and reward == "code_sandbox":
            yield key, Read(None, SANDBOXED if value else f"{CODE_URL} is the address of the server; remove the key")
        elif key == CODE_URL and reward == "code_sandbox" and value is not None:
            is_used = not given.get(USE_LOCAL)
            yield key, Read(SANDBOX, "") if is_used else Read(None, f"{USE_LOCAL}: true takes precedence")
        elif key == REWARD_TYPE and reward == "crossthinkqa" or key == LENGTH and reward == "crossthinkqa" and value:
            yield key, Read(key, "")
        elif key == REWARD_TYPE and reward == "ifeval":
            yield key, Read(None, "a response either meets its constraint or fails; remove the key")
        elif key == LENGTH and not value:
            yield key, Read(None, "roll already does this; remove the key")
        else:
            yield key, Read(None, OF_REWARD_FUNCTIONS[key])
