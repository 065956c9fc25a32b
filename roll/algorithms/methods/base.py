"""A method as a key of the configuration names it: its name, the keys it reads, and its traits, which the checks go by."""

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
    """Whether a name is one of the user's: `package.module:Name`."""
    return isinstance(name, str) and PATH.fullmatch(name) is not None


def declares(traits: object) -> Callable[[Entry], Entry]:
    """Decorator that records the traits of a user's estimator, loss or correction, and returns it unchanged."""

    def mark(entry: Entry) -> Entry:
        setattr(entry, DECLARED, traits)
        return entry

    return mark


def declared(entry: object) -> object | None:
    """What `declares` said; None where it was not called."""
    return getattr(entry, DECLARED, None)


def same_names(keys: Fields) -> Fields:
    """The fields of an implementation that are called as the keys are."""
    return keys


@dataclass(frozen=True)
class Method(Generic[Traits]):
    """One estimator, loss or correction. Its implementation is registered under the same name in `roll/algorithms/`, or is the user's."""

    name: str
    traits: Traits
    keys: tuple[str, ...] = ()
    """Root keys of the configuration that this method reads and that not every method of its kind reads."""
    fields: Callable[[Fields], Fields] = same_names
    """Maps the values of `keys` to the arguments of the implementation."""

    def __str__(self) -> str:
        return self.name

    @property
    def is_users(self) -> bool:
        """Whether it is named as `package.module:Name`. It then reads no keys of the root."""
        return is_path(self.name)

    def arguments(self, config: object) -> Fields:
        """What the implementation is made with, from a configuration that has the method's keys."""
        return self.fields({key: getattr(config, key) for key in self.keys})


Methods = Mapping[str, Method[Traits]]


def table(*methods: Method[Traits]) -> Methods[Traits]:
    """Methods by name, in this order, which is that of the messages and of the reference of keys."""
    return MappingProxyType({method.name: method for method in methods})


def readers(known: Mapping[str, Method[Any]]) -> dict[str, tuple[str, ...]]:
    """Maps each key that only some methods read to the names of these methods."""
    keys = dict.fromkeys(key for method in known.values() for key in method.keys)
    return {key: tuple(method.name for method in known.values() if key in method.keys) for key in keys}
