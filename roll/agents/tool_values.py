"""Writes the value that a tool returned as text for a model. Pure functions."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import uuid
from collections.abc import Collection, Mapping
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

from roll.agents.environments.picture_contents import is_shown

WRITTEN = (
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    PurePath,
)
"""Types whose values are written as the text that `str` gives."""
ARRAYS = ("numpy", "torch")
"""Packages whose arrays and numbers are written as lists and numbers."""


class Unwritable(ValueError):
    """A value cannot be written. `str()` continues the answer's name."""


def text_of_value(value: Any) -> str:
    """Return a text as it is, and any other value as JSON.

    Arrays and numbers of NumPy and torch become lists and numbers; dataclasses and models of pydantic become mappings.

    Raises:
        Unwritable: the value has a picture, or an object that JSON cannot express.
    """
    if isinstance(value, str):
        return str(value)
    try:
        return json.dumps(value, default=_plain, ensure_ascii=False)
    except Unwritable:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise Unwritable(f"cannot be written as JSON: {error}") from error


def _plain(value: Any) -> Any:
    """Return a value that JSON cannot express as one that it can."""
    if is_shown(value):
        raise Unwritable("has a picture or bytes inside another value: return it by itself or in a list")
    if type(value).__module__.partition(".")[0] in ARRAYS and callable(listed := getattr(value, "tolist", None)):
        return listed()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)  # the order of a set differs from process to process
    if isinstance(value, WRITTEN):
        return str(value)
    if isinstance(value, Collection):
        return list(value)
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise Unwritable(f"has a value of type {name}, which JSON cannot express: return text, numbers, lists or mappings")
