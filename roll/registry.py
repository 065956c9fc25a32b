"""A table of interchangeable functions or classes by name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

Entry = TypeVar("Entry")
Registered = TypeVar("Registered")


class Registry(Mapping[str, Entry], Generic[Entry]):
    """Maps names to entries. The error for an unknown name lists the known names and the nearest one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, Entry] = {}

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Return a decorator that adds an entry under `name`, unchanged. Raises ValueError if `name` is registered."""

        def add(entry: Registered) -> Registered:
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
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def nearest(name: str, known: Mapping[str, object] | list[str]) -> str:
    """Return ` (did you mean 'x'?)` for a misspelt name, or an empty string if no known name is similar."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
