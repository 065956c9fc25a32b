"""Names of other programs: the tables of `foreign_names.yaml`, and the kinds of values in their settings.

TRL, transformers, accelerate, verl, OpenRLHF, Megatron and DeepSpeed: their names are refused, with the key of roll to
use instead. ROLL: its keys are read, ignored or refused by `roll.config.roll_v2`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roll.errors import Fault
from roll.registry import nearest


@dataclass(frozen=True)
class ValueKind:
    """The set of values that a key accepts."""

    said: str
    holds: Callable[[Any], bool]


def _is_number(value: Any, least: float = 0.0) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= sys.maxsize


def _is_integer(value: Any, least: float) -> bool:
    return _is_number(value, least) and float(value).is_integer()  # 5e8 is a float in YAML, which DeepSpeed accepts


FLAG = ValueKind("true or false", lambda value: isinstance(value, bool))
COUNT = ValueKind("a whole number, at least 0", lambda value: _is_integer(value, 0))
SIZE = ValueKind("a whole number, at least 1", lambda value: _is_integer(value, 1))
NUMBER = ValueKind("a number, at least 0", _is_number)
FRACTION = ValueKind("a number from 0 to 1", lambda value: _is_number(value) and value <= 1)
BLOCK = ValueKind("a block of keys", lambda value: isinstance(value, Mapping))


def one_of(*names: str) -> ValueKind:
    """Return the kind that accepts one of several words."""
    return ValueKind(f"{', '.join(names[:-1])} or {names[-1]}", lambda value: value in names)


PRECISION = one_of("fp32", "fp16", "bf16")
KINDS = {"flag": FLAG, "count": COUNT, "size": SIZE, "number": NUMBER, "block": BLOCK, "precision": PRECISION}
"""Kinds by their names in `foreign_names.yaml`."""


def block_faults(
    where: str, given: Mapping[str, Any], kinds: Mapping[str, ValueKind], refused: Mapping[str, tuple[str, str]]
) -> Iterator[Fault]:
    """Yield faults of unknown keys, refused keys and values of the wrong kind.

    The value `auto`, DeepSpeed's own choice, is valid for every key.
    """
    for key, value in given.items():
        said = str(value).lower() if isinstance(value, bool) else repr(value)
        if key in refused:
            why, instead = refused[key]
            yield Fault(f"{where}.{key}", f"{said}, but {why}", f"remove it; {instead}", "not_supported")
        elif key not in kinds:
            near = nearest(key, list(kinds))
            remedy = "correct the name, or remove the key" if near else f"known keys of this block: {', '.join(kinds)}"
            yield Fault(f"{where}.{key}", f"unknown key, with the value {said}{near}", remedy, "unknown_key")
        elif value != "auto" and not kinds[key].holds(value):
            yield Fault(
                f"{where}.{key}",
                f"{said} is not allowed",
                f"give {kinds[key].said}, or auto for DeepSpeed's own choice",
                "not_allowed",
            )


ROLES = ("actor_train", "actor_infer", "reference", "critic", "sft_train", "reward_train", "student", "teacher")
ROLE = "<role>"
CRITIC_START = "reward_pretrain"
"""Root key of ROLL for the model of rewards, where a critic without a model of its own starts."""


@dataclass(frozen=True)
class Counterpart:
    """The key of roll that corresponds to a key of another program."""

    key: str | None = None
    """Path in the schema. None if roll needs no key for it."""
    how: str = ""
    """Form of the value in roll. Without a key: what to do instead, and why no key is needed."""


def _counterparts(groups: list[dict[str, Any]]) -> dict[str, Counterpart]:
    return {name: Counterpart(group.get("key"), group.get("how", "")) for group in groups for name in group["names"]}


def _refused(groups: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    return {key: (group["why"], group["use"]) for group in groups for key in group["keys"]}


def _block(block: dict[str, Any]) -> tuple[dict[str, ValueKind], dict[str, tuple[str, str]]]:
    return {key: KINDS[kind] for kind, keys in block["kinds"].items() for key in keys}, _refused(block["refused"])


_TABLES = yaml.load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
)
_ROLL = _TABLES["roll"]

OTHER_NAMES: Mapping[str, Counterpart] = _counterparts(_TABLES["other_programs"])
"""Counterparts in roll, by the name in the other program."""
OTHER_NAMES_IN_RLVR: Mapping[str, Counterpart] = _counterparts(_TABLES["other_programs_in_rlvr"])
"""Counterparts in `pipeline: rlvr` that differ from those in the other pipelines, or that exist only there."""
PROGRAMS: Mapping[str, str] = _TABLES["programs"]
"""Root keys of other programs' configuration files, each with the name of its program."""
STRATEGIES: Mapping[str, tuple[str, str]] = {name: (of, use) for name, (of, use) in _TABLES["strategies"].items()}
"""By ROLL's strategy name, the backend that roll does not support, and its replacement."""
MEGATRON_KEYS: Mapping[str, str] = _TABLES["megatron_keys"]
"""Keys of Megatron's `strategy_config`, with their replacements in that of DeepSpeed."""
DEEPSPEED_SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle")
"""DeepSpeed's learning-rate schedules."""
REMOVED_OPTIMIZERS = ("onebit_adam", "zero_one_adam", "onebit_lamb")
"""roll's names of optimizers that DeepSpeed 0.19 has removed."""
DEEPSPEED_REFUSED: Mapping[str, tuple[str, str]] = _refused(_TABLES["deepspeed_refused"])
"""Refused keys at the top level of DeepSpeed's configuration, with reason and remedy."""
DEEPSPEED_IDLE: Mapping[str, str] = _TABLES["deepspeed_idle"]
"""Keys at the top level of DeepSpeed's configuration that change no result, with what happens instead."""
DEEPSPEED_BLOCKS: Mapping[str, tuple[Mapping[str, ValueKind], Mapping[str, tuple[str, str]]]] = {
    name: _block(block) for name, block in _TABLES["deepspeed_blocks"].items()
}
"""By block of DeepSpeed, the kinds of its keys that are not in the schema (`deepspeed/runtime/zero/config.py`), and its
refused keys.
"""
HYDRA_FLAGS: Mapping[str, tuple[str, str]] = _refused(_TABLES["hydra_flags"])
"""Flags of Hydra that are refused, with reason and remedy."""
HYDRA_PLUGINS: Mapping[str, tuple[str, str, str]] = {
    kind: (plugin["works"], plugin["why"], plugin["use"]) for kind, plugin in _TABLES["hydra_plugins"].items()
}
"""By kind of Hydra plugin: the only one that works, the reason why others do not, and the remedy."""
HYDRA_IDLE: Mapping[str, tuple[list[Any], str]] = {
    key: (idle["silent"], idle["use"]) for key, idle in _TABLES["hydra_idle"].items()
}
"""Keys of Hydra that have no effect, below `hydra`: the default of each and values that ask for what happens anyway,
and what to use instead of others.
"""
VARIABLES_WITHOUT_EFFECT: Mapping[str, str] = _TABLES["variables"]
"""Environment variables of other programs that roll does not read, with their replacements in roll."""

BACKEND_KEYS: Mapping[str, list[str]] = _ROLL["backend_keys"]
"""By backend that only ROLL has: keys of its `strategy_config` that do not change the result of training."""
MEGATRON_FUSIONS: list[str] = _ROLL["megatron_fusions"]
"""Keys in the block `additional_configs` of Megatron that do not change the result of training."""
VARIABLES: list[str] = _ROLL["variables"]
"""Root keys that ROLL's files use as variables in `${...}`. Unused ones are refused on the command line only."""
IGNORED: Mapping[str, str] = _ROLL["ignored"]
"""Keys that do not affect the result of training, with replacements, by key path."""
REFUSED: Mapping[str, str] = _ROLL["refused"]
"""Keys that affect the result of training: faults, with replacements, by key path."""
HOLDS: Mapping[str, bool | int | str] = _ROLL["holds"]
"""Values for which ROLL does what roll always does. A key of `REFUSED` with this value is not a fault."""
READ_AS: Mapping[str, str] = _ROLL["read_as"]
"""ROLL's key path to roll's key path."""
MEANINGS: Mapping[str, Mapping[bool | str, str | None]] = _ROLL["meanings"]
"""Translations of values, for key paths in `READ_AS`. None means that roll always does what the value requests. Other
values have no counterpart.
"""
DIFFERS: Mapping[str, Mapping[bool | str, str]] = _ROLL["differs"]
"""Differences between ROLL's behaviour and roll's counterpart, for key paths and values in `MEANINGS`."""
UNREAD: Mapping[str, list[str]] = _ROLL["unread"]
"""Root keys that neither ROLL's loss nor roll's counterpart reads, by value of `actor_train.pg_variant`."""
VALUES: Mapping[str, Mapping[bool | str | None, str | None]] = _ROLL["values"]
"""Values that ROLL and roll write differently, by key path."""
OWN_WORKERS: list[str] = _ROLL["own_workers"]
"""Classes of ROLL's roles that have counterparts in roll. Any other `worker_cls` is the user's, with a loss or a
rollout of its own.
"""
WORKERS_BY_VARIANT: list[str] = _ROLL["workers_by_variant"]
"""Classes whose loss `pg_variant` chooses. All others have PPO's."""
REWARD_CLASSES: Mapping[str, str] = _ROLL["reward_classes"]
"""Class name at the end of `rewards.*.worker_cls` to the name of the reward function, for classes with a counterpart in
roll.
"""
READ_SPECIALLY: Mapping[str, str] = _ROLL["read_specially"]
"""How keys are read that no other table describes, in Markdown, by key path, for docs/configuration.md."""
OF_MANAGERS: Mapping[str, str] = _ROLL["of_managers"]
"""Keys of an environment manager that are not read, with the reason."""
OF_ENVIRONMENTS: Mapping[str, str] = _ROLL["of_environments"]
"""Keys of an environment's definition that do not affect the result of training, with the reason."""
OF_REWARD_MODELS: Mapping[str, str] = _ROLL["of_reward_models"]
"""Keys of a domain that a function does not read, with the reason. They are ignored with a warning."""
OF_REWARD_FUNCTIONS: Mapping[str, str] = _ROLL["of_reward_functions"]
"""Keys of a domain that only some functions read, with the replacement for the others."""
DEFAULTS: Mapping[str, bool | int | float | str] = _ROLL["defaults"]
"""Defaults of ROLL v0.2.1 that differ from roll's, by key path."""
