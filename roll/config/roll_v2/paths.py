"""Finds the keys of a plain configuration that match a pattern."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from roll.config.schema.foreign_names import ROLE, ROLES


def matches(
    values: Any, pattern: Sequence[str], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the key paths that match a pattern, each with the block that contains its last key."""
    if not isinstance(values, dict):
        return
    names = {"*": tuple(values), ROLE: ROLES}.get(pattern[0], (pattern[0],))
    for step in (name for name in names if name in values):
        if len(pattern) == 1:
            yield (*above, step), values
        else:
            yield from matches(values[step], pattern[1:], (*above, step))
