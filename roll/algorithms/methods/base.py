"""A method selected by a configuration key: its name, its own keys, and its traits, which the configuration checks
use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeGuard, TypeVar

Traits = TypeVar("Traits")
Entry = TypeVar("Entry")
Fields = Mapping[str, Any]
PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
DECLARED = "declared_traits"
"""The attribute that `declares` sets."""


def is_path(name: object) -> TypeGuard[str]:
    """Return whether a name refers to user code, in the form `package.module:Name`."""
    return isinstance(name, str) and PATH.fullmatch(name) is not None


def declares(traits: object) -> Callable[[Entry], Entry]:
    """Return a decorator that attaches `traits` to a reward, estimator, loss or correction, and is otherwise without
    effect.
    """

    def mark(entry: Entry) -> Entry:
        setattr(entry, DECLARED, traits)
        return entry

    return mark


def declared(entry: object) -> object | None:
    """Return the traits recorded by `declares`, or None if there are none."""
    return getattr(entry, DECLARED, None)


def same_names(keys: Fields) -> Fields:
    """Return the values unchanged, for implementations whose arguments have the names of the keys."""
    return keys


@dataclass(frozen=True)
class Method(Generic[Traits]):
    """One estimator, loss or correction. Its implementation is registered under the same name in `roll/algorithms/`, or
    is user code.
    """

    name: str
    traits: Traits
    keys: tuple[str, ...] = ()
    """Root keys of the configuration that this method reads, and that some other methods of its kind do not read."""
    fields: Callable[[Fields], Fields] = same_names
    """Function that maps the values of `keys` to the arguments of the implementation."""

    def __str__(self) -> str:
        return self.name

    @property
    def is_users(self) -> bool:
        """Return whether the method is user code, named `package.module:Name`. It then reads no root keys."""
        return is_path(self.name)

    def arguments(self, config: object) -> Fields:
        """Return the implementation's arguments, read from a configuration that has the method's keys."""
        return self.fields({key: getattr(config, key) for key in self.keys})


Methods = Mapping[str, Method[Traits]]


def methods_table(*methods: Method[Traits]) -> Methods[Traits]:
    """Return the methods by name. Messages and the configuration reference list them in this order."""
    return MappingProxyType({method.name: method for method in methods})


def readers(known: Mapping[str, Method[Any]]) -> dict[str, tuple[str, ...]]:
    """Map each key that only some methods read to the names of these methods."""
    keys = dict.fromkeys(key for method in known.values() for key in method.keys)
    return {key: tuple(method.name for method in known.values() if key in method.keys) for key in keys}
