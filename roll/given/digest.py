"""A digest of what a function or class does, which is the same in every process.

It covers the bytecode and the values that the function refers to: defaults, closures and globals, with the functions
and classes of `__main__` among them. Comments, line numbers and file names do not matter, but the version of Python
does. What can be imported counts by its name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from hashlib import sha256
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle

LENGTH = 12
"""Number of hexadecimal digits of a digest."""
OF_EVERY_CLASS = {"__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__"}


def digest_of(given: Any) -> str:
    """Return the digest of a function, class or callable object."""
    return sha256(repr(_described(given, {})).encode()).hexdigest()[:LENGTH]


def _described(value: Any, seen: dict[int, int]) -> object:
    """Return a nested tuple of texts and numbers that stands for a value.

    Args:
        seen: numbers of the objects around this one, by id, so that recursion ends.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return (type(value).__name__, value)
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen = {**seen, id(value): len(seen)}
    if isinstance(value, ModuleType):
        return ("module", value.__name__)
    if isinstance(value, CodeType):
        consts = [_described(one, seen) for one in value.co_consts]
        names = (value.co_names, value.co_varnames, value.co_freevars, value.co_flags)
        return ("code", value.co_code.hex(), value.co_exceptiontable.hex(), names, consts)
    if isinstance(value, FunctionType | type) and not _is_of_program(value):
        return ("name", value.__module__, value.__qualname__)
    if isinstance(value, FunctionType):
        return _function(value, seen)
    if isinstance(value, MethodType):
        return ("method", _described(value.__self__, seen), _described(value.__func__, seen))
    if isinstance(value, type):
        held = {name: one for name, one in vars(value).items() if name not in OF_EVERY_CLASS}
        return ("class", value.__qualname__, _described(value.__bases__, seen), _described(held, seen))
    if isinstance(value, staticmethod | classmethod):
        return (type(value).__name__, _described(value.__func__, seen))
    if isinstance(value, property):
        return ("property", *(_described(one, seen) for one in (value.fget, value.fset, value.fdel)))
    return _container(value, seen)


def _container(value: Any, seen: dict[int, int]) -> object:
    if isinstance(value, Mapping):
        return ("mapping", [(_described(key, seen), _described(one, seen)) for key, one in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [_described(one, seen) for one in value])
    if isinstance(value, set | frozenset):  # their order differs between processes
        return ("set", sorted(repr(_described(one, seen)) for one in value))
    if _is_of_program(type(value)) and hasattr(value, "__dict__"):
        return ("object", _described(type(value), seen), _described(vars(value), seen))
    try:
        return ("bytes", sha256(cloudpickle.dumps(value)).hexdigest())
    except Exception:  # what cannot be pickled is refused elsewhere
        return ("type", type(value).__qualname__)


def _function(function: FunctionType, seen: dict[int, int]) -> object:
    cells = [_cell(cell) for cell in function.__closure__ or ()]
    names = sorted(_names(function.__code__) & function.__globals__.keys())
    held = {name: function.__globals__[name] for name in names}
    given = (function.__defaults__, function.__kwdefaults__, cells, held, vars(function))
    return ("function", _described(function.__code__, seen), *(_described(one, seen) for one in given))


def _cell(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes that a function uses, with those of the functions inside it."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return {*code.co_names, *(name for one in inner for name in _names(one))}


def _is_of_program(value: Any) -> bool:
    """Whether a function or class can only be sent to another process as a whole, and not by its name."""
    module = sys.modules.get(str(value.__module__))
    if module is None or value.__module__ == "__main__":
        return True
    found: Any = module
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not value
