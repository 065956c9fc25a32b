"""Removes inherited entries: `environments.calculator: ~` in a file or `rewards.math_rule=null` on the command line."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from roll.config.schema.fields import blocks_of, union_members, variant_of


def without_removed(values: Mapping[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """Return the plain values of a block without the entries that are null in mappings of user-chosen names.

    Such mappings are `rewards`, `environments`, `validation.sets`, `system_envs`, ...; a whole mapping that is null is
    removed, too. Mappings with values of any type, such as `reward_args`, keep their nulls.
    """
    kept: dict[str, Any] = {}
    for key, value in values.items():
        field = section.model_fields.get(key)
        named = field is not None and _has_named_entries(field.annotation)
        if named and value is None:
            continue
        if named and isinstance(value, Mapping):
            value = {name: entry for name, entry in value.items() if entry is not None}
        kept[key] = value if field is None else _below(value, field.annotation)
    return kept


def _below(value: Any, annotation: object) -> Any:
    """Return a key's value with the entries removed from the blocks in it."""
    if not isinstance(value, Mapping) or not (found := blocks_of(annotation)):
        return value
    if found[0][1]:
        return {name: _in_block(entry, found) for name, entry in value.items()}
    return _in_block(value, found)


def _in_block(value: Any, found: tuple[tuple[type[BaseModel], bool], ...]) -> Any:
    block = variant_of([block for block, _ in found], value)
    return without_removed(value, block) if isinstance(value, Mapping) and block else value


def _has_named_entries(annotation: object) -> bool:
    return any(
        typing.get_origin(part) is dict and Any not in union_members(typing.get_args(part)[1])
        for part in union_members(annotation)
    )
