"""Converts pydantic's errors into faults, with place, problem, value and remedy."""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from roll.config.schema.backend import BackendConfig
from roll.config.schema.base import NO_METHOD
from roll.config.schema.fields import DISCRIMINATOR, blocks_of, dotted, paths_of_key, section_at
from roll.config.schema.foreign_names import OTHER_NAMES, OTHER_NAMES_IN_RLVR, PROGRAMS, STRATEGIES
from roll.config.schema.pipelines import PIPELINES
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import ExperimentConfig
from roll.config.schema.secrets import HIDDEN, LOGIN, is_secret, redacted
from roll.errors import Fault, FaultCode

KINDS = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "a block of keys",
    "model_type": "a block of keys",
    "model_attributes_type": "a block of keys",
    "tuple_type": "a list",
    "list_type": "a list",
}
BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
CODES: Mapping[str, FaultCode] = {
    **dict.fromkeys(KINDS, "wrong_type"),
    **dict.fromkeys(BOUNDS, "out_of_range"),
    "finite_number": "out_of_range",
    "string_pattern_mismatch": "malformed",
    "string_too_long": "too_large",
    "path_too_long": "too_large",
    "too_short": "too_small",
}
"""Codes of pydantic's errors. The others are `not_allowed`."""
LEARNER = "<learner>"
"""Placeholder for the trained role of the pipeline, for example `actor_train`."""
LEARNERS = ("actor_train", "sft_train", "reward_train", "student")
MOST_NAMED = 12
"""Largest number of keys of a block that one message translates."""
NUMBER = re.compile(r"-?\d+\.?\d*(e[+-]?\d+)?")
MANY = 24
"""Largest number of a block's keys that a message lists."""


def schema_faults(error: ValidationError, root: type[BaseModel], values: Mapping[str, Any]) -> list[Fault]:
    """Return pydantic's errors as faults, one for each place.

    Args:
        error: The error that the validation of `values` raised.
        root: The schema.
        values: The configuration that was validated, as plain dicts and lists.
    """
    details: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        details.setdefault(_place(detail, values), []).append(detail)
    # In a union (a string or a list of strings), the error with the longer path is more precise.
    whole = [
        place
        for place in details
        if not any(len(other) > len(place) and other[: len(place)] == place for other in details)
    ]
    # If the strategy itself is refused, its settings belong to another program, and their errors are not reported.
    foreign = {(*place[:-1], "strategy_config") for place in whole if place[-1:] == (DISCRIMINATOR,)}
    whole = [place for place in whole if not any(place[: len(block)] == block for block in foreign)]
    return list(dict.fromkeys(_fault(place, details[place], root, values) for place in whole))


def without_unknown(values: Mapping[str, Any], error: ValidationError) -> dict[str, Any]:
    """Return the values without the unknown keys that `error` names."""
    left = copy.deepcopy(dict(values))
    for detail in error.errors(include_url=False):
        if detail["type"] == "extra_forbidden":
            *above, key = _place(detail, values)
            block: Any = left
            for step in above:
                block = block[step]
            block.pop(key, None)
    return left


def unknown_key(place: Sequence[str | int], value: Any, root: type[BaseModel], values: Mapping[str, Any]) -> Fault:
    """Return the fault of an unknown key. The remedy is the nearest key in the block, or the block where the key
    belongs.

    If the block contains settings of a strategy other than the chosen one, return one fault for the whole block
    instead, equal for all of its keys.
    """
    foreign = _foreign_block(place, root, values)
    if foreign:
        return foreign
    name = str(place[-1])
    section = section_at(root, place[:-1], values)
    backend = section if section and issubclass(section, BackendConfig) else None
    if backend and name in backend.refused_keys:
        why, instead = backend.refused_keys[name]
        return Fault(dotted(place), f"{printable(value)}{why}", instead, "not_supported")
    known = sorted(section.model_fields) if section else []
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    elsewhere = _elsewhere(place, root, values)
    owners = (
        [pipeline for pipeline, schema in PIPELINES.items() if name in schema.model_fields] if section is root else []
    )
    is_roll = name not in PROGRAMS and bool(owners or close)
    translated = (None if is_roll else counterparts_of_block(name, value, root)) or counterpart_of(name, root)
    if translated and not backend:
        return Fault(
            dotted(place), f"unknown key, with the value {printable_at(place, value)}", translated, "unknown_key"
        )
    above = dotted(place[:-1]) or "the root"
    if owners and not elsewhere:
        remedy = f"this is a key of pipeline: {' or '.join(owners)}; remove it, or change the pipeline"
    elif close:
        remedy = f"did you mean '{close[0]}'?"
    elif elsewhere:
        remedy = f"this key belongs to {' or '.join(elsewhere[:4])}"
    elif backend and backend.other_keys:
        remedy = backend.other_keys
    else:
        far = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        remedy = f"did you mean '{far[0]}'? " if far else ""
        listed = f"known keys of {above}: {', '.join(known) or 'none'}"
        remedy += listed if len(known) <= MANY else f"docs/configuration.md lists the keys of {above}"
    return Fault(dotted(place), f"unknown key, with the value {printable_at(place, value)}", remedy, "unknown_key")


def _elsewhere(place: Sequence[str | int], root: type[BaseModel], values: Mapping[str, Any]) -> list[str]:
    """Return the paths of other keys with the same name.

    Paths in root blocks that the file does not have are left out, unless there are no others.
    """
    found = [path for path in paths_of_key(root, str(place[-1])) if path != dotted(place)]
    return [path for path in found if "." not in path or path.partition(".")[0] in values] or found


def _foreign_block(place: Sequence[str | int], root: type[BaseModel], values: Mapping[str, Any]) -> Fault | None:
    """Return a fault if `strategy_name` was overridden, but `strategy_config` has keys of the file's; else None."""
    role = section_at(root, place[:1], values) if len(place) == 4 and place[2] == "strategy_config" else None
    if role is None:
        return None
    strategy_args = values[str(place[0])][place[1]]
    for strategy, _ in blocks_of(role.model_fields["strategy_args"].annotation):
        if any(
            place[3] in settings.model_fields
            for settings, _ in blocks_of(strategy.model_fields["strategy_config"].annotation)
        ):
            (owner,) = get_args(strategy.model_fields[DISCRIMINATOR].annotation)
            keys, chosen = ", ".join(strategy_args["strategy_config"]), strategy_args[DISCRIMINATOR]
            problem = f"holds settings of {owner} ({keys}), but {DISCRIMINATOR} is {chosen}"
            return Fault(
                dotted(place[:-1]),
                problem,
                f"remove the block, which belongs to another strategy: ~{dotted(place[:-1])}",
                "misplaced",
            )
    return None


def unread_method_keys(config: BaseModel, choice: str, own: Mapping[str, Sequence[str]]) -> Iterator[Fault]:
    """Yield faults of keys that the chosen method does not read.

    Args:
        choice: The key that selects the method, such as `policy_loss`.
        own: By key, the methods that read it.
    """
    chosen = str(getattr(config, choice))
    for key, readers in own.items():
        value = getattr(config, key)
        if key in config.model_fields_set and value is not None and chosen not in readers:
            shown = f"{value:g}" if isinstance(value, float) else printable(value)
            yield Fault(
                key,
                f"{shown}, but {choice} {chosen} does not read it",
                f"remove it, or set {choice}={' or '.join(readers)}",
                "unread",
            )


def printable(value: Any) -> str:
    """Return a value as JSON for a message, without secrets and truncated to 120 characters."""
    text = json.dumps(redacted(value), ensure_ascii=False, default=str)
    return text if len(text) <= 120 else text[:117] + "..."


def printable_at(place: Sequence[str | int], value: Any) -> str:
    """Like `shown`, but hide the value if the key marks it as secret: a string, and in `system_envs` also a number."""
    is_text = isinstance(value, str) or "system_envs" in place and not isinstance(value, Mapping)
    return HIDDEN if is_text and any(map(is_secret, place)) or place[-1] == LOGIN else printable(value)


def _place(detail: ErrorDetails, values: Any) -> tuple[str | int, ...]:
    """Return pydantic's location without tags of unions: steps that exist in `values`, and a missing key's name."""
    place: list[str | int] = []
    last = len(detail["loc"]) - 1
    for index, step in enumerate(detail["loc"]):
        if step in _steps(values):
            place.append(step)
            values = values[step]
        elif index == last and detail["type"] == "missing":
            place.append(step)
    return tuple(place)


def _steps(values: Any) -> Iterable[str | int]:
    """Return the keys of a block, or the positions of a list."""
    if isinstance(values, Mapping):
        return values.keys()
    return range(len(values)) if isinstance(values, list) else ()


def _fault(
    place: tuple[str | int, ...], details: Sequence[ErrorDetails], root: type[BaseModel], values: Mapping[str, Any]
) -> Fault:
    detail, kind = details[0], details[0]["type"]
    value = printable_at(place, detail["input"])
    if kind == "extra_forbidden":
        return unknown_key(place, detail["input"], root, values)
    if kind == "missing":
        return _missing(place, root, values)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        chosen: Any = detail["input"].get(DISCRIMINATOR) if isinstance(detail["input"], Mapping) else detail["input"]
        problem, code = "required, but missing", "missing"
        if kind == "union_tag_invalid":
            problem, code = f"unknown strategy {printable(chosen)}", "unknown_name"
        remedy = f"known strategies of this role: {_strategies(place, root, values)}"
        if isinstance(chosen, str) and chosen in STRATEGIES:
            backend, instead = STRATEGIES[chosen]
            problem, code = f"{chosen}, but roll does not support {backend}", "not_supported"
            remedy = f"{instead}; {remedy}"
        return Fault(dotted((*place, DISCRIMINATOR)), problem, remedy, code)
    if (
        place[-1:] == (DISCRIMINATOR,) and isinstance(detail["input"], str) and detail["input"] in STRATEGIES
    ):  # a role with a single strategy
        backend, instead = STRATEGIES[detail["input"]]
        remedy = f"{instead}; known strategies of this role: {detail.get('ctx', {}).get('expected', '')}"
        return Fault(dotted(place), f"{detail['input']}, but roll does not support {backend}", remedy, "not_supported")
    if kind in ("literal_error", NO_METHOD):
        expected = detail.get("ctx", {}).get("expected", "")
        choices = [choice.strip("'") for choice in expected.replace(" or ", ", ").split(", ")]
        close = difflib.get_close_matches(str(detail["input"]), choices, n=1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        hint = ", without quotes" if detail["input"] in choices else hint
        others = [_expected(other) for other in details[1:]]
        hint += "; or your own, as package.module:Name" * (kind == NO_METHOD)
        if isinstance(detail["input"], bool) and (other := counterpart_of(str(place[-1]), root)):
            hint += f"; {other.partition('; ')[2]}"
        return Fault(
            dotted(place),
            f"{value} is not allowed",
            f"allowed: {', or '.join([expected, *others])}{hint}",
            "not_allowed",
        )
    remedy = f"give {' or '.join(dict.fromkeys(_expected(one) for one in details))}{_quotes(details)}"
    if isinstance(detail["input"], str) and place[-1:] == ("strategy_config",):
        remedy += f", or {_as_preset(detail['input'], dotted(place))}"
    return Fault(dotted(place), f"{value} is not allowed", remedy, CODES.get(kind, "not_allowed"))


def _as_preset(named: str, place: str) -> str:
    """Return the remedy for a file or preset name in place of a block. Hydra composes the file; JSON is valid YAML."""
    if not named.endswith((".json", ".yaml", ".yml")):
        return f"${{{named}}} with the preset of this name in `defaults`"
    name = PurePath(named).stem
    return (
        f"save the file as {name}.yaml (JSON is valid YAML) in the folder of the experiment, and add `- "
        f"{name}@{place}` to `defaults`"
    )


def _strategies(place: tuple[str | int, ...], root: type[BaseModel], values: Mapping[str, Any]) -> str:
    """Return the names of the strategies that the schema allows at this `strategy_args`."""
    section = section_at(root, place[:-1], values)
    blocks = blocks_of(section.model_fields[str(place[-1])].annotation) if section else ()
    names = [name for block, _ in blocks for name in get_args(block.model_fields[DISCRIMINATOR].annotation)]
    return ", ".join(f"'{name}'" for name in names)


def _missing(place: tuple[str | int, ...], root: type[BaseModel], values: Mapping[str, Any]) -> Fault:
    section = section_at(root, place[:-1], values)
    field = section.model_fields.get(str(place[-1])) if section else None
    meaning = f": {field.description}" if field and field.description else ""
    return Fault(dotted(place), "required, but missing", f"add the key{meaning}", "missing")


def _expected(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in KINDS:
        return KINDS[kind]
    if kind in BOUNDS:
        bound, word = BOUNDS[kind]
        return f"a number {word} {context[bound]}"
    if kind == "finite_number":
        return "a finite number"
    if kind == "string_too_long":
        return f"a string of at most {context['max_length']} characters"
    if kind == "string_pattern_mismatch":
        return f"a string of the form {context['pattern']}"
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "too_short":
        return f"at least {context['min_length']} of them"
    message = detail["msg"]
    return message[0].lower() + message[1:]


def _quotes(details: Sequence[ErrorDetails]) -> str:
    """Return the remedy for the most common type error: a number or a boolean in quotes."""
    value = details[0]["input"]
    if not isinstance(value, str) or not any(one["type"] in ("int_type", "float_type", "bool_type") for one in details):
        return ""
    plain = value.strip().lower()
    return ", without quotes" if plain in ("true", "false") or NUMBER.fullmatch(plain) else ""


def counterpart_of(name: str, root: type[BaseModel]) -> str | None:
    """Return the remedy for another program's name: the key to use instead. Return None for an unknown name.

    Args:
        name: The name in the other program.
        root: The schema of the pipeline, or `ExperimentConfig` if the pipeline is unknown.
    """
    found = OTHER_NAMES_IN_RLVR.get(name) if root is RlvrConfig else None
    found = found or OTHER_NAMES.get(name)
    if found is None:
        return None
    learner = next((role for role in LEARNERS if role in root.model_fields), "ROLE")
    how = found.how.replace(LEARNER, learner)
    if found.key is None:
        return how
    key = found.key.replace(LEARNER, learner)
    first = key.partition(".")[0]
    if first == "ROLE":
        key += f" (ROLE is {', '.join(LEARNERS)})"
    elif root is not ExperimentConfig and first not in root.model_fields:
        key += ", a key of another pipeline"
    return f"use {key}" + (f"; {how}" if how else "")


def counterparts_of_block(name: str, block: Any, root: type[BaseModel]) -> str | None:
    """Return the remedy for a block of another program's file, key by key. Return None if none of its keys is known."""
    if not isinstance(block, Mapping):
        return None
    known = [f"{path}: {text}" for path, leaf in _leaves(block) if (text := counterpart_of(leaf, root))]
    if not known:
        return None
    more = f"; and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
    of = f"this is a block of {PROGRAMS[name]}; " if name in PROGRAMS else ""
    of += "python -m roll.convert translates the whole script; " if PROGRAMS.get(name) == "verl" else ""
    return f"{of}use these keys: " + "; ".join(known[:MOST_NAMED]) + more


def _leaves(block: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in block.items():
        path = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path, str(key)
