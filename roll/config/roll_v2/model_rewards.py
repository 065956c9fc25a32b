"""Translates ROLL's keys for domains that a model scores, and drops these keys from domains that a function scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from roll.config.schema.faults import printable
from roll.config.schema.model_rewards import MODEL_REWARDS
from roll.errors import Fault

MODEL, FUNCTION = "it is a function and loads no model", "it is a function and calls no judge"
OF_MODELS = {
    "model_args": MODEL,
    "data_args": "it is a function and reads no data set",
    "generating_args": "it is a function and generates nothing",
    "strategy_args": "it is a function and has no backend",
    "device_mapping": "it is a function and runs on the CPU; use world_size",
    "infer_batch_size": "it is a function and scores responses one by one; use world_size",
    "judge_prompt": FUNCTION,
    "judge_model_type": FUNCTION,
    "judge_model_name": FUNCTION,
    "judge_api_url": FUNCTION,
    "judge_api_key": FUNCTION,
}
"""Keys of a domain that a function does not read, with the reason. They are ignored with a warning."""
NEUTRAL = {"infer_batch_size": 1}
"""Values with which these keys are ignored without a warning; null if not listed. A resolved configuration of ROLL
contains every key.
"""
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
            faults += [
                Fault(*(part.replace(STAND_IN, where) for part in (fault.place, fault.problem, fault.remedy)))
                for fault in wrong
            ]
        else:
            for key in [key for key in OF_MODELS if key in block and block[key] != NEUTRAL.get(key)]:
                value = "the key" if key == "judge_api_key" else printable(block[key])
                del block[key]
                warnings.append(f"{where}.{key}: {value} is ignored; the reward does not read it: {OF_MODELS[key]}")
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
        )
    ]
