"""Batch-invariant engines call FlashAttention so that it chooses the same tile for each batch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.engines.vllm import one_tile
from roll.weight_sync import vllm_plugin


def asked(query: Tensor, longest: int, *, by_name: bool) -> int:
    """Return the `max_seqlen_q` that the kernel gets. Everything else must arrive as it was given."""
    got: dict[str, Any] = {}

    def kernel(q: Tensor, *, max_seqlen_q: int, causal: bool) -> Tensor:
        assert q is query and causal
        got["longest"] = max_seqlen_q
        return q + 1

    call, parts = one_tile.with_one_tile(kernel), ([], {"q": query}) if by_name else ([query], {})
    assert torch.equal(call(*parts[0], **parts[1], max_seqlen_q=longest, causal=True), query + 1)
    return got["longest"]


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize(("width", "longest", "expected"), [(64, 1, 65), (64, 500, 500), (32, 7, 65), (128, 1, 1)])
def test_small_heads_have_many_new_tokens(width: int, longest: int, expected: int, by_name: bool) -> None:
    assert asked(torch.zeros(3, 2, width), longest, by_name=by_name) == expected


@pytest.mark.parametrize(("variable", "on_cpu", "kept"), [("1", False, 1), ("0", False, 0), ("1", True, 0)])
def test_the_plug_in_asks_for_it(variable: str, on_cpu: bool, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(vllm_plugin, "current_platform", type("Platform", (), {"is_cpu": lambda _: on_cpu})())
    monkeypatch.setattr(one_tile, "keep_one_tile", lambda: calls.append(None))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", variable)
    vllm_plugin.register()
    assert len(calls) == kept


def test_the_backend_s_kernel_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ModuleType("backend")
    monkeypatch.setattr(one_tile, "import_module", lambda name: backend)
    one_tile.keep_one_tile()
    assert not hasattr(backend, one_tile.NAME), "on the CPU there is none"
    vars(backend)[one_tile.NAME] = lambda q, **given: q
    one_tile.keep_one_tile()
    replaced = vars(backend)[one_tile.NAME]
    one_tile.keep_one_tile()
    assert vars(backend)[one_tile.NAME] is replaced and hasattr(replaced, "__wrapped__")
