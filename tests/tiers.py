"""The two tiers of a matrix: the cases of `make test`, and those that `make test-all` adds (the mark `full`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def tiered(cases: Sequence[T], quick: Sequence[T]) -> list[Any]:
    """The cases as parameters of a test; those that are not `quick` are marked `full`. A case that is a tuple fills several parameters."""

    def parameter(case: T) -> Any:
        values = case if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=() if case in quick else pytest.mark.full)

    assert set(quick) <= set(cases), "a case of `make test` is not among the cases"
    return [parameter(case) for case in cases]


def each(names: str, cases: Sequence[T], quick: Sequence[T], ids: Callable[[Any], Any] | None = None) -> pytest.MarkDecorator:
    """A parametrisation by `tiered` cases."""
    return pytest.mark.parametrize(names, tiered(cases, quick), ids=ids)


def collected(request: pytest.FixtureRequest, cases: Sequence[T], quick: Sequence[T]) -> list[T]:
    """What a fixture that runs many cases at once must run: all of them where a test of the module that is marked `full` was selected."""
    module = request.node.getparent(pytest.Module)
    full = any(item.get_closest_marker("full") and item.getparent(pytest.Module) is module for item in request.session.items)
    return list(cases if full else quick)
