"""The two tiers of a parametrised test: the cases of `make test`, and those that `make test-all` adds (marked
`full`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def tiered(cases: Sequence[T], quick: Sequence[T]) -> list[Any]:
    """Return the cases as `pytest.param`s, marked `full` unless they are `quick`. A tuple supplies the values of
    several parameters.
    """

    def parameter(case: T) -> Any:
        values = case if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=() if case in quick else pytest.mark.full)

    assert set(quick) <= set(cases), "a case of `make test` is not among the cases"
    return [parameter(case) for case in cases]


def each(
    names: str, cases: Sequence[T], quick: Sequence[T], ids: Callable[[Any], Any] | None = None
) -> pytest.MarkDecorator:
    """Return a `parametrize` decorator over `tiered` cases."""
    return pytest.mark.parametrize(names, tiered(cases, quick), ids=ids)


def collected(request: pytest.FixtureRequest, cases: Sequence[T], quick: Sequence[T]) -> list[T]:
    """Return the cases that a fixture must run: all of them if a test of its module that is marked `full` was selected,
    else `quick`.
    """
    module = request.node.getparent(pytest.Module)
    full = any(
        item.get_closest_marker("full") and item.getparent(pytest.Module) is module for item in request.session.items
    )
    return list(cases if full else quick)
