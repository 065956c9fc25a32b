"""The schema as a tree: finds the keys of a place, and the places of a key."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ANY_NAME = "<name>"
"""Stands for the free key of a mapping: `rewards.<name>.timeout`."""
DISCRIMINATOR = "strategy_name"


@dataclass(frozen=True)
class Key:
    """One key of the schema."""

    path: tuple[str, ...]
    field: FieldInfo
    section: type[BaseModel]
    """The block that holds it."""


def members(annotation: object) -> tuple[object, ...]:
    """Return the alternatives of a type: those of a union without None. `Annotated` is unwrapped."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return members(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(found for part in typing.get_args(annotation) if part is not type(None) for found in members(part))
    return (annotation,)


def sections(annotation: object) -> tuple[tuple[type[BaseModel], bool], ...]:
    """Return the blocks of a type, each with whether it is under a free key (`dict[str, Block]`)."""
    found: list[tuple[type[BaseModel], bool]] = []
    for part in members(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            found.append((part, False))
        elif typing.get_origin(part) is dict:
            found += [(block, True) for block, _ in sections(typing.get_args(part)[1])]
    return tuple(found)


def walk(section: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[Key]:
    """Yield every key below a block, depth first, in the order of the schema."""
    for name, field in section.model_fields.items():
        path = (*above, name)
        yield Key(path, field, section)
        for block, keyed in sections(field.annotation):
            yield from walk(block, (*path, ANY_NAME) if keyed else path)


def section_at(root: type[BaseModel], place: Sequence[str | int], values: Any) -> type[BaseModel] | None:
    """Return the schema's block at a place of `values`, None if there is none.

    Among the variants of a union, the one whose `strategy_name` stands in `values` is taken.
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
        blocks = sections(section.model_fields[str(step)].annotation)
        section = _variant([block for block, _ in blocks], values)
        keyed = bool(blocks) and blocks[0][1]
    return section


def _variant(blocks: Sequence[type[BaseModel]], values: Any) -> type[BaseModel] | None:
    if len(blocks) <= 1:
        return blocks[0] if blocks else None
    chosen = values.get(DISCRIMINATOR) if isinstance(values, Mapping) else None
    for block in blocks:
        if chosen in typing.get_args(block.model_fields[DISCRIMINATOR].annotation):
            return block
    return None


def homes(root: type[BaseModel], name: str) -> list[str]:
    """Return the paths of keys with this name in the schema."""
    return list(dict.fromkeys(".".join(key.path) for key in walk(root) if key.path[-1] == name))


def dotted(place: Sequence[str | int]) -> str:
    """`actor_train.data_args.file_name[0]`."""
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text
