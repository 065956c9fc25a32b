"""Encodes and decodes plain values, with a tag for their type. link.py handles other objects."""

from __future__ import annotations

import builtins
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

Encode = Callable[[Any], Any]
MUTABLE = (list, dict, set, bytearray, deque, Counter, OrderedDict, defaultdict)
"""Types whose values a call may change. The changes are applied to the caller's object too."""
BY_TEXT: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, lambda value: value.decode("latin-1"), lambda text: text.encode("latin-1")),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*map(float, parts))),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*map(int, parts))),
    "Decimal": (Decimal, str, lambda text: Decimal(str(text))),
    "Fraction": (Fraction, str, lambda text: Fraction(str(text))),
    "datetime": (datetime, datetime.isoformat, lambda text: datetime.fromisoformat(text)),
    "date": (date, date.isoformat, lambda text: date.fromisoformat(text)),
    "timedelta": (
        timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: timedelta(*map(int, parts)),
    ),
}
"""By tag: the type, its encoder to values of JSON, and its decoder."""
TAG_OF = {kind: tag for tag, (kind, _, _) in BY_TEXT.items()}
SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "bytearray": bytearray,
    "deque": deque,
}
MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": dict,
}


def encode_plain(value: Any, encode: Encode) -> Any:
    """Encode a value whose type is exactly one of the plain types. Return None for any other value. `encode` encodes
    its items.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return [value]
    if kind in TAG_OF:
        tag = TAG_OF[kind]
        return [tag, BY_TEXT[tag][1](value)]
    if kind.__name__ in SEQUENCES and kind in (list, tuple, set, frozenset, bytearray, deque):
        return [kind.__name__, [encode(item) for item in value]]
    if kind in (dict, OrderedDict, Counter, defaultdict):
        return [kind.__name__, [[encode(key), encode(item)] for key, item in value.items()]]
    if kind is slice:
        return ["slice", [encode(value.start), encode(value.stop), encode(value.step)]]
    if value is Ellipsis or value is NotImplemented:
        return ["builtin", repr(value)]
    if isinstance(value, type) and value.__module__ == "builtins" and getattr(builtins, value.__name__, None) is value:
        return ["builtin", value.__name__]
    return None


def decode_plain(written: Any, decode: Encode) -> Any:
    """Decode a value that `encode_plain` encoded. `decode` decodes its items.

    Raises:
        ValueError: `written` is not an encoded plain value.
    """
    if len(written) == 1:
        if written[0] is None or isinstance(written[0], bool | int | float | str):
            return written[0]
        raise ValueError("not a value")
    tag, content = written
    if tag in BY_TEXT:
        return BY_TEXT[tag][2](content)
    if tag in SEQUENCES:
        return SEQUENCES[tag](decode(item) for item in content)
    if tag == "defaultdict":
        return defaultdict(None, ((decode(key), decode(item)) for key, item in content))
    if tag in MAPPINGS:
        return MAPPINGS[tag]({decode(key): decode(item) for key, item in content})
    if tag == "slice":
        return slice(*(decode(part) for part in content))
    found = getattr(builtins, content, None) if tag == "builtin" and isinstance(content, str) else None
    if isinstance(found, type) or found is Ellipsis or found is NotImplemented:
        return found
    raise ValueError(f"'{tag}' is not a kind of value")


def overwrite(old: Any, new: Any) -> None:
    """Replace the content of a container `old`, of a type in MUTABLE, with the content of `new`."""
    if isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)
    else:
        old.clear()
        old.update(new)
