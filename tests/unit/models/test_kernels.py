"""Optional kernels: flash-attn and Liger, with stand-ins for their packages."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import AttentionInterface

from roll.config.schema.model import ModelConfig
from roll.errors import ConfigError
from roll.models import load as kernels
from roll.models.attention import packed_attention
from roll.models.load import load_causal_model

ABSENT = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")


def asks_for(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"dtype": "fp32"} | keys)


@ABSENT
def test_fa2_without_its_package_is_read_as_auto(tiny_model: Path) -> None:
    kernels_used = [
        load_causal_model(str(tiny_model), asks_for(attn_implementation=name)).config._attn_implementation
        for name in ("fa2", "auto")
    ]
    assert kernels_used[0] == kernels_used[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_liger_without_gpu_raises_with_remedy(tiny_model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_causal_model(str(tiny_model), asks_for(liger=True))
    [fault] = caught.value.faults
    assert (fault.place, fault.code) == ("model_args.liger", "not_supported")
    assert "no GPU" in fault.problem and "remove the key" in fault.remedy


def test_liger_patches_layers_and_not_losses(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def apply(
        rope: bool,
        cross_entropy: bool,
        fused_linear_cross_entropy: bool,
        rms_norm: bool,
        swiglu: bool,
        model: nn.Module,
    ) -> None:
        asked.update(layers=(rope, rms_norm, swiglu), losses=(cross_entropy, fused_linear_cross_entropy), model=model)

    package = ModuleType("liger_kernel.transformers")
    package.__dict__["apply_liger_kernel_to_qwen2"] = apply
    monkeypatch.setitem(sys.modules, "liger_kernel", _installed("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = load_causal_model(str(tiny_model), asks_for(), packed=False)
    kernels.apply_liger(model)
    assert asked == {"layers": (True, True, True), "losses": (False, False), "model": model}


def _installed(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    return module


@pytest.mark.parametrize("changes", [{}, {"softcap": 0.7}, {"s_aux": torch.tensor([-1.0, 0.5, 2.0, 0.0])}], ids=str)
@pytest.mark.parametrize("window", [None, 3])
def test_flash_attention_is_given_what_its_package_documents(window: int | None, changes: dict[str, Any]) -> None:
    """The stand-in does what `flash_attn_varlen_func` documents. The window of that function is the number of visible
    earlier tokens.
    """

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *, dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        assert not dropout_p and causal and cu_q is cu_k and max_q == max_k == int(cu_q.diff().max())
        out = torch.zeros_like(q)
        for begin, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
            distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)[None]
            hidden = (distance < 0) | ((distance > window_size[0]) if window_size[0] >= 0 else False)
            scores = torch.einsum("qhd,khd->hqk", q[begin:end], k[begin:end].repeat_interleave(2, 1)) * softmax_scale
            scores = softcap * (scores / softcap).tanh() if softcap else scores
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v[begin:end].repeat_interleave(2, 1))
        return out

    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(1, heads, 9, 16, generator=generator) for heads in (4, 2, 2))
    offsets = torch.tensor([0, 3, 9]).int()
    given: dict[str, Any] = {"cu_seq_lens_q": offsets, "max_length_q": 6, "scaling": 0.3}
    given |= {"sliding_window": window, **changes}
    out, _ = kernels.flash_attention(varlen)(nn.Identity(), query, key, value, None, **given)
    expected, _ = packed_attention(nn.Identity(), query, key, value, None, **given)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_flash_attention_keeps_compiled_layer_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    package = _installed("flash_attn")
    package.__dict__["flash_attn_varlen_func"] = lambda q, *_, softmax_scale, **__: q * softmax_scale
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    attend = AttentionInterface()[kernels.register_flash()]
    query, offsets = torch.ones(1, 2, 5, 4), torch.tensor([0, 5]).int()

    def layer(query: Tensor) -> Tensor:
        return attend(None, query, query, query, None, cu_seq_lens_q=offsets, max_length_q=5, scaling=0.5)[0]

    counter = CompileCounter()
    assert torch.equal(torch.compile(layer, backend=counter, fullgraph=True)(query), torch.full((1, 5, 2, 4), 0.5))
    assert counter.frame_count == 1
