"""Detects whether a call of a reward function replaced a definition. The next call must then run in another process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter, itemgetter
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from roll.hosted.raised import INSTALLED

_CODE = attrgetter("__code__")


class _Namespace(NamedTuple):
    """The functions, classes and modules that a module or class holds, by name."""

    name: str
    variables: Mapping[str, Any]
    names: tuple[str, ...]
    look: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    held: tuple[Any, ...]


class Definitions:
    """A snapshot of functions, classes and modules by name, taken when this object is created.

    It covers the modules of the reward functions, all other modules that are not installed packages (including the methods of their
    classes), and `builtins`. Other values, such as a cache or a model that is loaded at the first call, may change freely.
    """

    def __init__(self, own: Iterable[str]) -> None:
        """
        Args:
            own: names of the modules of the reward functions.
        """
        names = {"builtins", *own}
        loaded = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
        modules = [module for module in loaded if module.__name__ in names or _is_users(module)]
        self._namespaces = [found for module in modules for found in _namespaces(module)]
        functions = [held for space in self._namespaces for held in space.held if isinstance(held, FunctionType)]
        self._functions = tuple(functions)
        self._codes = [function.__code__ for function in functions]

    def replaced(self) -> str:
        """Return the first name whose definition was replaced or deleted since the snapshot, or an empty string."""
        for space in self._namespaces:
            try:
                if space.look(space.variables) == space.held:
                    continue
            except KeyError:
                pass
            return next(_differing(space), "")
        if list(map(_CODE, self._functions)) != self._codes:
            return next(
                f"{f.__module__}.{f.__qualname__}" for f, code in zip(self._functions, self._codes, strict=True) if f.__code__ is not code
            )
        return ""


def _is_users(module: ModuleType) -> bool:
    file = vars(module).get("__file__")
    return isinstance(file, str) and not file.startswith(INSTALLED)


def _namespaces(module: ModuleType) -> Iterator[_Namespace]:
    name, variables = module.__name__, vars(module)
    yield from _namespace(name, variables, variables.items())
    for found in list(variables.values()) if _is_users(module) else ():
        if isinstance(found, type) and found.__module__ == name:
            yield from _namespace(f"{name}.{found.__qualname__}", vars(found), vars(found).items())


def _namespace(name: str, variables: Mapping[str, Any], items: Iterable[tuple[str, Any]]) -> Iterator[_Namespace]:
    defined = {key: value for key, value in items if _is_definition(value)}
    if defined:
        first, *others = names = tuple(defined)
        look = itemgetter(*names) if others else lambda variables: (variables[first],)
        yield _Namespace(name, variables, names, look, tuple(defined.values()))


def _is_definition(value: Any) -> bool:
    if getattr(value, "__module__", "") == "typing":  # `typing` itself replaces the __init__ of a Protocol's subclass at its first use
        return False
    return callable(value) or isinstance(value, ModuleType | property | staticmethod | classmethod)


def _differing(space: _Namespace) -> Iterator[str]:
    for name, held in zip(space.names, space.held, strict=True):
        if space.variables.get(name) is not held:
            yield f"{space.name}.{name}"
