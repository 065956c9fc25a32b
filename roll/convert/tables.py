"""What becomes of the keys of other programs: the tables of this folder's YAML files.

Each file has the parts `same` (the key of roll with the same value), `values` (the key of roll, and its value for each
value), `read` (how code in this package reads the key), `idle` (no effect in roll, and why), `lost` (not translated,
and what to do instead), `refused` (such files are not translated at all), `was` (older names of keys) and `defaults`
(the program's, which are written out where roll's may differ). A name that ends in `.*` stands for all keys below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from roll.config.schema.foreign_names import OTHER_NAMES, OTHER_NAMES_IN_RLVR, Counterpart

Part = Literal["same", "values", "read", "idle", "lost", "refused"]
PARTS: tuple[Part, ...] = ("same", "values", "read", "idle", "lost", "refused")


@dataclass(frozen=True)
class Rule:
    """What becomes of one key."""

    part: Part
    said: str
    """The key of roll (`same`, `values`), how the key is read (`read`), or why it is not (the others)."""
    values: Mapping[Any, Any] | None = None
    """`values`: the value in roll by the value in the program. `lost`: the values for which nothing is lost."""


@dataclass(frozen=True)
class Table:
    """The rules and defaults of one program, or of one of its trainers."""

    rules: Mapping[str, Rule]
    was: Mapping[str, str]
    defaults: Mapping[str, Any]

    def rule(self, key: str) -> Rule | None:
        """Return the rule of a key: its own, or that of the longest `NAME.*` above it."""
        if key in self.rules:
            return self.rules[key]
        parts = key.split(".")
        names = (".".join([*parts[:length], "*"]) for length in range(len(parts) - 1, 0, -1))
        return next((self.rules[name] for name in names if name in self.rules), None)


@cache
def table(*names: str) -> Table:
    """Return the table that several files of this folder make up; those named later take precedence."""
    rules: dict[str, Rule] = {}
    was: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    for name in names:
        text = (Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8")
        parts: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        rules |= _rules(parts)
        was |= parts.get("was", {})
        defaults |= parts.get("defaults", {})
    return Table(rules, was, defaults)


def _rules(parts: Mapping[str, Any]) -> dict[str, Rule]:
    found = {key: Rule("same", path) for key, path in parts.get("same", {}).items()}
    found |= {key: Rule("values", entry["to"], entry["of"]) for key, entry in parts.get("values", {}).items()}
    found |= {key: Rule("read", how) for key, how in parts.get("read", {}).items()}
    others: tuple[Part, ...] = ("idle", "lost", "refused")
    for part in others:
        for group in parts.get(part, []):
            silent = group.get("silent", {})
            found |= {
                key: Rule(part, group["why"], dict.fromkeys(silent[key]) if key in silent else None)
                for key in group["keys"]
            }
    return found


def hint(key: str, in_rlvr: bool) -> str:
    """Return what the tables of refused names say about a key that no rule describes, or an empty text."""
    for name in (key, key.split(".")[-1]):
        found = (OTHER_NAMES_IN_RLVR.get(name) if in_rlvr else None) or OTHER_NAMES.get(name)
        if found:
            return _said(found)
    return ""


def _said(found: Counterpart) -> str:
    return f"see {found.key}{': ' if found.how else ''}{found.how}" if found.key else found.how
