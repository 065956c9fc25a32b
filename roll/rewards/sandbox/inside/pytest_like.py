"""A substitute for pytest, which imports slowly: raises, approx, parametrize, fixtures, skip and fail."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any


class Skipped(Exception):
    """Raised by a test that is skipped."""


def skip(reason: str = "", **_: Any) -> None:
    raise Skipped(reason)


def fail(reason: str = "", **_: Any) -> None:
    raise AssertionError(reason)


class Raised:
    """The exception that `raises` caught."""

    value: Any = None
    type: Any = None

    def match(self, pattern: str) -> bool:
        assert re.search(pattern, str(self.value)), f"{pattern!r} does not match {str(self.value)!r}"
        return True

    def __str__(self) -> str:
        return str(self.value)


@contextmanager
def _raising(expected: Any, match: str | None) -> Iterator[Raised]:
    raised = Raised()
    try:
        yield raised
    except expected as error:
        raised.value, raised.type = error, type(error)
        if match is not None:
            raised.match(match)
    else:
        raise AssertionError(f"{expected} was not raised")


def raises(
    expected: Any, function: Callable[..., Any] | None = None, *args: Any, match: str | None = None, **kwargs: Any
) -> Any:
    """Check that an expected exception is raised: by `function` if given, else in the returned context."""
    if function is None:
        return _raising(expected, match)
    with _raising(expected, match) as raised:
        function(*args, **kwargs)
    return raised


class approx:
    """Compares equal within a tolerance, element by element. The tolerance is the larger of `rel` (1e-6) times the
    expected value and `abs` (1e-12).
    """

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self.expected, self._rel, self._abs, self._nan_ok = expected, rel, abs, nan_ok

    def __eq__(self, actual: Any) -> bool:
        return self._near(self.expected, actual)

    def __repr__(self) -> str:
        return f"approx({self.expected!r})"

    def _near(self, expected: Any, actual: Any) -> bool:
        if isinstance(expected, Mapping):
            return (
                isinstance(actual, Mapping)
                and expected.keys() == actual.keys()
                and all(self._near(value, actual[key]) for key, value in expected.items())
            )
        if isinstance(expected, list | tuple):
            return (
                isinstance(actual, list | tuple)
                and len(expected) == len(actual)
                and all(self._near(*pair) for pair in zip(expected, actual, strict=True))
            )
        if (
            isinstance(expected, bool)
            or not isinstance(expected, int | float | complex)
            or not isinstance(actual, int | float | complex)
        ):
            return bool(expected == actual)
        if isinstance(expected, float) and math.isnan(expected):
            return self._nan_ok and isinstance(actual, float) and math.isnan(actual)
        if expected == actual:
            return True
        relative = self._rel if self._rel is not None else 0.0 if self._abs is not None else 1e-6
        least = self._abs if self._abs is not None else 1e-12
        distance = abs(expected - actual)
        return not math.isinf(distance) and distance <= max(relative * abs(expected), least)


class Fixture:
    """A function whose result is passed to tests that have a parameter of its name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__module__, self.__name__ = function, function.__module__, function.__name__


def fixture(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return Fixture if function is None else Fixture(function)


class _Mark:
    """Implements `mark.parametrize`. Other marks have no effect."""

    def parametrize(self, names: Any, values: Any, **_: Any) -> Callable[[Any], Any]:
        split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        rows = [dict(zip(split, _values(value, len(split)), strict=True)) for value in values]

        def marked(function: Any) -> Any:
            function.parameters = [*getattr(function, "parameters", []), rows]
            return function

        return marked

    def __getattr__(self, name: str) -> Any:
        def marked(*args: Any, **_: Any) -> Any:
            return args[0] if len(args) == 1 and callable(args[0]) else lambda function: function

        return marked


mark = _Mark()


class Row(tuple):
    """The arguments of one call of a parametrised test."""


def param(*values: Any, **_: Any) -> Row:
    return Row(values)


def _values(value: Any, count: int) -> Any:
    return value if count > 1 or isinstance(value, Row) else (value,)


def parametrised(function: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each call of a test function that its `parametrize` marks require."""
    for rows in product(*getattr(function, "parameters", [])):
        yield {name: value for row in rows for name, value in row.items()}


@contextmanager
def fixtures_for(function: Any, given: Mapping[str, Any], fixtures: Mapping[str, Fixture]) -> Iterator[dict[str, Any]]:
    """Yield the values of a test's fixtures. Raises LookupError for an unknown fixture."""
    with ExitStack() as stack:
        yield {name: _value(name, fixtures, stack) for name in _needed(function) if name not in given}


def _needed(function: Any) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
    ]


def _value(name: str, fixtures: Mapping[str, Fixture], stack: ExitStack) -> Any:
    if name not in fixtures:
        raise LookupError(f"there is no fixture '{name}'")
    function = fixtures[name].function
    arguments = {inner: _value(inner, fixtures, stack) for inner in _needed(function)}
    if inspect.isgeneratorfunction(function):
        return stack.enter_context(contextmanager(function)(**arguments))
    return function(**arguments)
