"""Turns a composed configuration into a checked, immutable one."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from pydantic import ValidationError

from roll.config.load.accelerate_file import accelerate_fault, is_accelerates
from roll.config.load.deepspeed_file import settle_deepspeed, settle_presets
from roll.config.load.entry_points import settle_registered
from roll.config.load.removed import without_removed
from roll.config.load.stores import settle_stores
from roll.config.load.user_code import inspect_user_code
from roll.config.roll_v2.meanings import is_of_roll, settle_defaults, settle_meanings
from roll.config.roll_v2.pictures import picture_faults
from roll.config.roll_v2.translate import Translation, referenced_text, translate
from roll.config.schema.faults import counterpart_of, printable, schema_faults, without_unknown
from roll.config.schema.fields import dotted
from roll.config.schema.pipelines import PIPELINES, Config
from roll.config.shipped import preset_names
from roll.errors import ConfigError, Fault
from roll.registry import nearest

ROLES = {"sft_train": "sft", "reward_train": "reward_model", "student": "distill"}
"""Pipelines by the role that they train, which no other pipeline has."""
OWN = {**ROLES, "beta": "dpo", "preference_loss": "dpo"}
"""Pipelines by root key, for files without `pipeline`."""
RLVR = ("adv_estimator", "rewards", "num_return_sequences_in_group", "rollout_batch_size", "actor_infer")
"""Root keys that decide for `rlvr` in a file without `pipeline`, even if it also has keys of another pipeline by
mistake. They do not decide if the file has a role in `ROLES` and no `actor_train`.
"""
ROOTS = {*RLVR, *ROLES, "pipeline", "actor_train"}
"""Root keys of which an experiment has at least one."""

DEEPEST = 50
"""Largest depth of nested blocks and lists."""
FLATTEN = "nest blocks and lists less deeply"
UNUSABLE = re.compile("[\x00\ud800-\udfff]")
"""Characters that are refused everywhere: NUL, and lone surrogates, Python's form of bytes that are not UTF-8."""


class ConfigWarning(UserWarning):
    """A key or value that is accepted, but should be written differently."""


@dataclass(frozen=True)
class LoadedConfig:
    """A composed configuration, checked against the schema."""

    config: Config | None
    """The configuration without the unknown keys, or None if the faults prevent further checks."""
    faults: list[Fault]


def checked_config(composed: DictConfig, passing: Collection[str] | None = None, imports: bool = True) -> Config:
    """Return the configuration that `read_config` reads. Raises ConfigError with all of its faults."""
    loaded = read_config(composed, passing, imports)
    if loaded.faults:
        raise ConfigError(*loaded.faults)
    assert loaded.config is not None, "neither a configuration nor a fault"
    return loaded.config


def read_config(composed: DictConfig, passing: Collection[str] | None = None, imports: bool = True) -> LoadedConfig:
    """Resolve a composed configuration, translate ROLL's keys, and check it against the schema.

    Args:
        composed: The configuration that Hydra composed from the files and the command line, without the `hydra` node.
        passing: Root keys that only `${...}` uses, and that are dropped after it is resolved. Defaults to the names of
            the shipped presets.
        imports: Whether to import the user's code (`package.module:Name`) in a separate process, and check it.

    Returns:
        The configuration, of the class that `pipeline` chooses (`RlvrConfig` by default), with all faults found.

    Raises:
        ConfigError: the configuration cannot be resolved, its pipeline is unknown, or it is about video or diffusion
            models, or about pictures in a way that roll has no counterpart to.

    Warns:
        ConfigWarning: a key of ROLL has another name or no meaning here, or behaves differently.
    """
    if unusable := list(_unusable(OmegaConf.to_container(composed, resolve=False))):
        raise ConfigError(*unusable)
    plain = _resolve(composed)
    if not plain.keys() - {"dry_run"}:
        raise ConfigError(Fault("the configuration", "it sets no key", "give a file with keys", "empty"))
    if is_accelerates(plain) and not plain.keys() & ROOTS:
        raise ConfigError(accelerate_fault("the configuration", plain))
    if pictures := picture_faults(plain):
        raise ConfigError(*pictures)
    settle_presets(plain)
    for name in preset_names() if passing is None else passing:
        if not any(name in schema.model_fields for schema in PIPELINES.values()):
            plain.pop(name, None)
    done = translate(plain, referenced_text(OmegaConf.to_container(composed, resolve=False)))
    if is_of_roll(done):
        _infer_pipeline(done)
        settle_meanings(done)
    settle_deepspeed(done)
    settle_defaults(done)
    settle_registered(done)
    settle_stores(done.values)
    for text in done.warnings:
        warnings.warn(text, ConfigWarning, stacklevel=2)
    return _check(done, imports)


def _unusable(node: Any, place: tuple[str | int, ...] = ()) -> Iterator[Fault]:
    """Yield the faults of an unresolved configuration that would be lost, or would end in a traceback, later."""
    where = UNUSABLE.sub("?", dotted(place))
    if len(place) > DEEPEST:
        yield Fault(where, f"blocks and lists are nested more than {DEEPEST} levels deep", FLATTEN, "too_large")
        return
    if isinstance(node, Mapping):
        if len(set(map(str, node))) < len(node):
            yield Fault(where, "two of its keys are the same when read as text", "remove one of them", "duplicate")
        for key, below in node.items():
            if isinstance(key, bool) or not isinstance(key, str | int):  # a table of symbols may have whole numbers
                yield Fault(dotted((*place, str(key))), "the key is not text", "quote the key", "wrong_type")
            yield from _unusable(below, (*place, str(key)))
    elif isinstance(node, list):
        for number, below in enumerate(node):
            yield from _unusable(below, (*place, number))
    if any(isinstance(text, str) and UNUSABLE.search(text) for text in (node, *place[-1:])):
        yield Fault(where, "it contains NUL, or bytes that are not UTF-8", "remove them", "malformed")


def _resolve(composed: DictConfig) -> dict[str, Any]:
    try:
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(resolution_fault(error)) from error
    assert isinstance(plain, dict), "a composed configuration is a mapping"
    return _with_text_keys(plain)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(below) for key, below in value.items()}
    return [_with_text_keys(below) for below in value] if isinstance(value, list) else value


def resolution_fault(error: OmegaConfBaseException) -> Fault:
    """Return OmegaConf's error about `${...}` or `???` as a fault."""
    place = str(error.full_key or error.key or "the configuration")
    message = str(error).split("\n    full_key")[0].strip()
    if isinstance(error, MissingMandatoryValue):
        return Fault(
            place,
            "the required value ??? was never set",
            f"set it in the file, or as {place}=... on the command line",
            "missing",
        )
    if isinstance(error, InterpolationKeyError):
        preset = next((name for name in preset_names() if f"'{name}'" in message), "deepspeed_zero3")
        remedy = f"define that key, or add the preset that defines it to `defaults`: ../config/{preset}@_here_"
        return Fault(place, message, remedy, "unresolved")
    if isinstance(error, InterpolationResolutionError):
        return Fault(place, message, "fix the expression in ${...}", "unresolved")
    return Fault(place, message, "fix this key in the file or on the command line", "unresolved")


def _infer_pipeline(done: Translation) -> None:
    """Set the pipeline that a file of ROLL means: there, the start script decides."""
    if "pipeline" not in done.values and (deciding := _deciding_key(done.values)):
        done.values["pipeline"] = OWN[deciding]
        done.warnings.append(
            f"pipeline: missing, so it is {OWN[deciding]}, because {deciding} is set; set it explicitly"
        )


def _check(done: Translation, imports: bool) -> LoadedConfig:
    values, faults = done.values, done.faults
    if "pipeline" not in values and (deciding := _deciding_key(values)):
        in_rlvr = counterpart_of(deciding, PIPELINES["rlvr"])
        remedy = f"add pipeline: {OWN[deciding]}" + (f"; in rlvr, {in_rlvr}" if in_rlvr else "")
        faults = [Fault("pipeline", f"missing, but {deciding} is set", remedy, "missing"), *faults]
        values = {**values, "pipeline": OWN[deciding]}
    pipeline = values.get("pipeline", "rlvr")
    if not isinstance(pipeline, str) or pipeline not in PIPELINES:
        known = ", ".join(PIPELINES)
        hint = nearest(str(pipeline), list(PIPELINES))
        raise ConfigError(
            Fault(
                "pipeline",
                f"there is no pipeline {printable(pipeline)}{hint}",
                f"use one of: {known}",
                "unknown_name",
            ),
            *faults,
        )
    schema = PIPELINES[pipeline]
    values = without_removed(values, schema)
    methods, wrong = inspect_user_code(values) if imports else ({}, [])
    faults = [*faults, *wrong]
    try:
        config = _validated(values, schema, methods)
        if values.keys() >= {key for key, field in schema.model_fields.items() if field.default is not None}:
            config = _validated(_chosen(config), schema, methods)
    except ValidationError as error:
        named = {fault.place for fault in faults}
        faults += [fault for fault in schema_faults(error, schema, values) if fault.place not in named]
        try:
            config = _validated(without_unknown(values, error), schema, methods)
        except ValidationError:
            config = None
    return LoadedConfig(config if done.is_whole and not wrong else None, faults)


def _chosen(config: Config) -> dict[str, Any]:
    """Return the values of the record of a run, the only file with every key, without those that equal a default: keys
    that a method does not read may not be set. The nulls of a block stay, because they may choose something, such as a
    `lora_target` that a file sets to null beside its `lora_rank`.
    """
    chosen = config.model_dump(mode="json", exclude_defaults=True)
    whole = config.model_dump(mode="json")
    return {key: _with_nulls(value, whole[key]) for key, value in chosen.items()}


def _with_nulls(chosen: Any, whole: Any) -> Any:
    if not isinstance(chosen, dict):
        return chosen
    nulls = {key: None for key, value in whole.items() if value is None}
    return nulls | {key: _with_nulls(value, whole[key]) for key, value in chosen.items()}


def _deciding_key(values: Mapping[str, Any]) -> str | None:
    """Return the root key that shows which pipeline a file without `pipeline` means, or None if it means `rlvr`."""
    if any(key in values for key in RLVR) and ("actor_train" in values or not any(role in values for role in ROLES)):
        return None
    return next((key for key in OWN if key in values), None)


def _validated(values: dict[str, Any], schema: type[Config], methods: Mapping[str, Any]) -> Config:
    return schema.model_validate_json(json.dumps(values, default=str), strict=True, context=methods)
