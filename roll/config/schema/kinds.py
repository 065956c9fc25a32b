"""Kinds of values in the settings of other programs, which are checked before they are passed on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


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
