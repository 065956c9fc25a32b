"""Navigates the schema as a tree: finds the keys at a path, and the paths of a key."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ANY_NAME = "<name>"
"""Placeholder for a user-chosen key of a mapping: `rewards.<name>.timeout`."""
DISCRIMINATOR = "strategy_name"


@dataclass(frozen=True)
class Key:
    """One key of the schema."""

    path: tuple[str, ...]
    field: FieldInfo
    section: type[BaseModel]
    """The block that contains the key."""


def union_members(annotation: object) -> tuple[object, ...]:
    """Return the members of a union without None, or the type itself. `Annotated` is unwrapped."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return union_members(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(
            found for part in typing.get_args(annotation) if part is not type(None) for found in union_members(part)
        )
    return (annotation,)


def blocks_of(annotation: object) -> tuple[tuple[type[BaseModel], bool], ...]:
    """Return the blocks in a type, each with whether it is a value of a mapping (`dict[str, Block]`)."""
    found: list[tuple[type[BaseModel], bool]] = []
    for part in union_members(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            found.append((part, False))
        elif typing.get_origin(part) is dict:
            found += [(block, True) for block, _ in blocks_of(typing.get_args(part)[1])]
    return tuple(found)


def walk(section: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[Key]:
    """Yield every key below a block, depth first, in the order of the schema."""
    for name, field in section.model_fields.items():
        path = (*above, name)
        yield Key(path, field, section)
        for block, keyed in blocks_of(field.annotation):
            yield from walk(block, (*path, ANY_NAME) if keyed else path)


def section_at(root: type[BaseModel], place: Sequence[str | int], values: Any) -> type[BaseModel] | None:
    """Return the block of the schema at a path in `values`, or None if the schema has no block there.

    The `strategy_name` in `values` selects the member of a union.
    """
    section: type[BaseModel] | None = root
    keyed = False
    for step in place:
        values = values.get(step) if isinstance(values, Mapping) else None
        if keyed:
            keyed = False
            continue
        if section is None or step not in section.model_fields:
            return None
        blocks = blocks_of(section.model_fields[str(step)].annotation)
        section = variant_of([block for block, _ in blocks], values)
        keyed = bool(blocks) and blocks[0][1]
    return section


def variant_of(blocks: Sequence[type[BaseModel]], values: Any) -> type[BaseModel] | None:
    """Return the block that `strategy_name` in `values` chooses, or the only one; None if it chooses none."""
    if len(blocks) <= 1:
        return blocks[0] if blocks else None
    chosen = values.get(DISCRIMINATOR) if isinstance(values, Mapping) else None
    for block in blocks:
        if chosen in typing.get_args(block.model_fields[DISCRIMINATOR].annotation):
            return block
    return None


def paths_of_key(root: type[BaseModel], name: str) -> list[str]:
    """Return the paths of all keys with this name."""
    return list(dict.fromkeys(".".join(key.path) for key in walk(root) if key.path[-1] == name))


def dotted(place: Sequence[str | int]) -> str:
    """Return a path as text: `actor_train.data_args.file_name[0]`."""
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text
