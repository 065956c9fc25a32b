"""Tables of interchangeable functions or classes by name: roll's own, and what installed packages register."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

Entry = TypeVar("Entry")
Added = TypeVar("Added")
REWARD_GROUP, ENVIRONMENT_GROUP = "roll.rewards", "roll.environments"
"""Groups of entry points in which packages register rewards and environments."""


class Registry(Mapping[str, Entry], Generic[Entry]):
    """Maps names to entries. The error for an unknown name lists the known names and the nearest one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, Entry] = {}

    def register(self, name: str) -> Callable[[Added], Added]:
        """Return a decorator that adds an entry under `name`, unchanged. Raises ValueError if `name` is registered."""

        def add(entry: Added) -> Added:
            if name in self._entries:
                raise ValueError(f"{self._kind} '{name}' is registered twice")
            self._entries[name] = cast(Entry, entry)
            return entry

        return add

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            raise KeyError(
                f"no {self._kind} is named '{name}'{nearest(name, self._entries)}; known: "
                f"{', '.join(sorted(self._entries))}"
            )
        return self._entries[name]

    def find(self, name: str) -> Entry:
        """Return the entry with this name, or the object that `package.module:Name` names."""
        return imported(name) if ":" in name else self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def imported(name: str) -> Any:
    """Return the object that `package.module:Name` names."""
    module, attribute = split_path(name)
    return getattr(imported_module(module), attribute)


def split_path(name: str) -> tuple[str, str]:
    """Return the module or file, and the name in it, of `package.module:Name` or `FILE.py:Name`. The name is empty
    without a colon.
    """
    module, _, attribute = name.rpartition(":") if ".py:" in name else name.partition(":")
    return module, attribute


def imported_module(name: str) -> ModuleType:
    """Import `package.module`, or the file of a name that ends with `.py`, relative to the working directory.

    Raises:
        ModuleNotFoundError: there is no such module or file.
        Exception: any error of the module itself.
    """
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = os.path.abspath(name)  # also the module's name, so that no file hides a module of another name
    if path in sys.modules:
        return sys.modules[path]
    spec = importlib.util.spec_from_file_location(path, path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise ModuleNotFoundError(f"there is no file '{name}'", name=name)
    module = sys.modules[path] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path]
        raise
    return module


def nearest(name: str, known: Mapping[str, object] | list[str]) -> str:
    """Return ` (did you mean 'x'?)` for a misspelt name, or an empty string if no known name is similar."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


@dataclass(frozen=True)
class Registered:
    """A name that an installed package registers."""

    name: str
    path: str
    """What it stands for, `package.module:Name`."""
    package: str

    def __str__(self) -> str:
        return f"{self.name} (of {self.package})"


def registered(group: str) -> list[Registered]:
    """Return what installed packages register in a group of entry points, by name. Imports none of it."""
    found = [Registered(one.name, one.value, one.dist.name if one.dist else "") for one in entry_points(group=group)]
    return sorted(found, key=lambda one: (one.name, one.package))
