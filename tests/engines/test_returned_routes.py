"""Routes of experts as vLLM's output holds them."""

from __future__ import annotations

import numpy as np
import pytest
from vllm.outputs import CompletionOutput

from roll.engines.vllm.strategy import routes_of
from roll.types import Routes


def output(finish_reason: str, routes: Routes | None) -> CompletionOutput:
    """Return an output of two tokens."""
    return CompletionOutput(0, "", [7, 8], None, None, routes, finish_reason=finish_reason)


def test_last_token_has_no_route() -> None:
    given = np.array([[[3, 1]], [[0, 2]]], np.int16)  # two tokens were read: that of the context, and the first one
    found = routes_of(output("stop", given))
    assert found is not None
    assert found.tolist() == [[[3, 1]], [[0, 2]], [[-1, -1]]]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_finished_response_without_routes_is_an_error(reason: str) -> None:
    with pytest.raises(RuntimeError, match="without the routes"):
        routes_of(output(reason, None))


def test_aborted_response_may_have_no_routes() -> None:
    assert routes_of(output("abort", None)) is None
