"""Python values as overrides of a command line: `key=value` in Hydra's grammar."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from roll.errors import ConfigError, Fault

KEY = re.compile(r"[\w/\-+.$%*@?|]+", re.ASCII)
"""Keys of blocks that need no escapes in Hydra's grammar."""


def word_of(key: str, value: object) -> str:
    """Return the override that sets a key to a Python value, as it is: a text with commas is no sweep.

    Raises:
        ConfigError: the value is none of None, bool, number, text, path, list and dict of these.
    """
    return f"{key}={_text(value, key)}"


def _text(value: Any, place: str) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        return QuotedString(str(value), Quote.single).with_quotes()
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        number = float(value)
        return repr(number) if math.isfinite(number) else str(number)
    if isinstance(value, Mapping):
        pairs = (f"{_key(name, place)}:{_text(one, f'{place}.{name}')}" for name, one in value.items())
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list | tuple | range):
        return "[" + ",".join(_text(one, f"{place}[{number}]") for number, one in enumerate(value)) + "]"
    problem = f"a {type(value).__name__} cannot be the value of a key: {value!r:.80}"
    raise ConfigError(Fault(place, problem, "give numbers, texts, lists and dicts", "wrong_type"))


def _key(name: object, place: str) -> str:
    if isinstance(name, str) and KEY.fullmatch(name):
        return name
    raise ConfigError(Fault(place, f"{name!r} cannot be a key", "use letters, digits, _, - and .", "malformed"))
