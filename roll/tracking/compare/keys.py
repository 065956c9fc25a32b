"""Compares the configurations of several runs. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

NAMES_OF_THE_RUN = ("output_dir", "exp_name")
"""Keys that differ between any two runs. They are not compared."""
ABSENT = "-"
"""Shown for a key or a block that a run does not have."""
ONLY_HERE = "only here"
"""Shown for a block that exists in this run only, if the block has no short form."""
PRESENT = "present"
"""Shown for a block that exists in several runs but not in all, if the block has no short form."""
SHORT_BLOCK = 40
"""Largest number of characters of a block that is shown as JSON."""
NAMING_KEYS = ("reward", "environment", "data_args.file_name", "model_args.model_name_or_path")
"""Keys of a block whose value, if given, stands for the block."""


def differing(trees: Sequence[Mapping[str, Any] | None], common_only: bool = False, prefix: str = "") -> dict[str, list[str]]:
    """Return the keys and blocks whose values differ, each with the text of every run's value, in the order of their paths (`a.b.c`).

    A block that only some runs have is one entry. If several runs have it, the keys that differ between those runs follow.

    Args:
        trees: one mapping for each run; None for a run that is not compared. The text of its values is `ABSENT`.
        common_only: whether to leave out keys that some of the mappings do not have.
        prefix: the path of the mappings, with a dot at its end.
    """
    compared = [tree for tree in trees if tree is not None]
    names = {name for tree in compared for name in tree if not common_only or all(name in one for one in compared)}
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=str):
        path = f"{prefix}{name}"
        if path in NAMES_OF_THE_RUN:
            continue
        blocks = [_block(tree, name) for tree in trees]
        count = sum(block is not None for block in blocks)
        texts = [ABSENT if tree is None or name not in tree else _text(tree[name]) for tree in trees]
        if not count:
            if len({text for text, tree in zip(texts, trees, strict=True) if tree is not None}) > 1:
                found[path] = texts
            continue
        if count < len(compared):
            unset = (_text(None), _text({}))
            others = [ABSENT if text in unset else text for text in texts]
            found[path] = [other if one is None else block_text(one, count == 1) for one, other in zip(blocks, others, strict=True)]
        if count > 1:
            found |= differing(blocks, common_only, f"{path}.")
    return found


def same_keys(trees: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of keys that have the same value in every run, without `NAMES_OF_THE_RUN`."""
    first, *others = [flattened(tree) for tree in trees]
    return sum(key not in NAMES_OF_THE_RUN and all(other.get(key) == value for other in others) for key, value in first.items())


def block_text(block: Mapping[str, Any], is_only: bool) -> str:
    """Return a short text for a block: its JSON, the names in it, the value of one of `NAMING_KEYS`, or else that it exists.

    `is_only` states whether no other run has the block.
    """
    if len(text := _text(block)) <= SHORT_BLOCK:
        return text
    if all(isinstance(value, dict) and value for value in block.values()):
        return ", ".join(map(str, block))
    flat = flattened(block)
    given = [flat[key] for key in NAMING_KEYS if flat.get(key, _text(None)) != _text(None)]
    return given[0] if given else ONLY_HERE if is_only else PRESENT


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the value of each key path (`a.b.c`) as JSON text; strings have no quotes. A list is one value."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flattened(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = _text(value)
    return found


def _block(tree: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    """Return the value of a key if it is a mapping that is not empty."""
    value = None if tree is None else tree.get(name)
    return value if isinstance(value, dict) and value else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
