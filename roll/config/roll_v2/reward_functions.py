"""Translates ROLL's keys for domains that a function scores to `reward_args`, or drops them with a warning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roll.config.schema.faults import printable

USE_LOCAL, CODE_URL, REWARD_TYPE, LENGTH = "use_local", "code_url", "reward_type", "response_length_penalty_coef"
KEYS = (USE_LOCAL, CODE_URL, REWARD_TYPE, LENGTH)
SANDBOX = "sandbox"
"""Argument of `code_sandbox` for the place where programs run, such as a server's address."""
SANDBOXED = "programs run on this machine in a sandbox, unlike in ROLL; remove the key"
MEANT = {
    USE_LOCAL: "ignored; `code_sandbox` runs programs on this machine in a sandbox, or on a server",
    CODE_URL: f"read as `reward_args.{SANDBOX}` of `code_sandbox`, unless `{USE_LOCAL}` is true; ignored for other "
    f"rewards",
    REWARD_TYPE: f"read as `reward_args.{REWARD_TYPE}` of `crossthinkqa`; ignored for other rewards",
    LENGTH: f"read as `reward_args.{LENGTH}` of `crossthinkqa`, unless it is 0; ignored for other rewards",
}
"""Treatment of each key, for the reference of keys."""
WITHOUT = {
    USE_LOCAL: "the reward runs no programs; remove the key",
    CODE_URL: "the reward runs no programs; remove the key",
    REWARD_TYPE: "use failed_value, and the values that the reward function returns",
    LENGTH: "use overlong_buffer, or reward_args",
}
"""Replacements for each key, for rewards that do not read it."""


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
    """Add to a domain the arguments with which its reward judges as ROLL does, unless they are set. Return what to warn
    of.
    """
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
            yield key, Read(None, WITHOUT[key])
