"""Kinds of values in the settings of other programs, which are checked before they are passed on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
            yield Fault(f"{where}.{key}", f"{said}, but {why}", f"remove it; {instead}")
        elif key not in kinds:
            near = nearest(key, list(kinds))
            remedy = "correct the name, or remove the key" if near else f"known keys of this block: {', '.join(kinds)}"
            yield Fault(f"{where}.{key}", f"unknown key, with the value {said}{near}", remedy)
        elif value != "auto" and not kinds[key].holds(value):
            yield Fault(
                f"{where}.{key}",
                f"{said} is not allowed",
                f"give {kinds[key].said}, or auto for DeepSpeed's own choice",
            )
