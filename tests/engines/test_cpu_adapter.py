"""`OneAdapterCPU` against float64 and against vLLM's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.punica_wrapper.punica_selector import get_punica_wrapper
from vllm.platforms import current_platform

from roll.engines.vllm.cpu_adapter import OneAdapterCPU, shared_slot
from roll.weight_sync.vllm_plugin import register

TOKENS, WIDTH, RANK, OUT = 7, 12, 4, (10, 6)
SCALE = 0.5


def matrices(adapters: int, out: int, width: int) -> Tensor:
    """Random matrices in the shape in which vLLM stacks them."""
    return torch.randn(adapters, 1, out, width)


@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize("adapters_of_tokens", [(3,) * TOKENS, (3, 3, 3, 5, 5, 3, 5)])
def test_result_equals_float64_and_vllm(is_prefill: bool, adapters_of_tokens: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ids: list[int | None] = [5, 3]
    down = tuple(matrices(2, RANK, WIDTH) for _ in OUT)
    up = tuple(matrices(2, out, RANK) for out in OUT)
    x, base = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, sum(OUT))
    mapping = LoRAMapping(adapters_of_tokens, adapters_of_tokens, is_prefill)

    def result(kind: type[PunicaWrapperCPU]) -> Tensor:
        wrapper: Any = kind(TOKENS, TOKENS, "cpu")
        wrapper.update_metadata(mapping, ids, 2, 100)
        y = base.clone()
        wrapper.add_lora_linear(y, x, down, up, SCALE, OUT)
        return y

    expected = base.double()
    for token, adapter in enumerate(adapters_of_tokens):
        slot, begin = ids.index(adapter), 0
        for a, b, out in zip(down, up, OUT, strict=True):
            added = SCALE * b[slot, 0].double() @ (a[slot, 0].double() @ x[token].double())
            expected[token, begin : begin + out] += added
            begin += out
    torch.testing.assert_close(result(OneAdapterCPU).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result(OneAdapterCPU), result(PunicaWrapperCPU), rtol=1e-5, atol=1e-5)


def test_slot_of_the_shared_adapter() -> None:
    assert shared_slot((3, 3), [5, 3]) == 1
    assert shared_slot((3, 5), [5, 3]) is None
    assert shared_slot((3, 0), [5, 3]) is None
    assert shared_slot((0, 0), [5, 3]) is None


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM for the CPU")
def test_vllm_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = type(current_platform)
    monkeypatch.setattr(platform, "get_punica_wrapper", platform.get_punica_wrapper)
    register()
    assert type(get_punica_wrapper(TOKENS, TOKENS, "cpu")) is OneAdapterCPU
