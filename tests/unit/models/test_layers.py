"""Checkpointed layers with inputs in host memory, and compiled layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import models
from roll.config.schema.model import ModelConfig
from roll.data.packing import concatenate
from roll.models.layers import checkpoint_first, compile_layers, keep_inputs, on_host, prepare_checkpointing
from roll.models.load import load_policy
from roll.models.packed import packed_inputs


def build() -> Qwen2ForCausalLM:
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=20, **shape)).train()


def gradients(model: Qwen2ForCausalLM) -> dict[str, Tensor]:
    ids = torch.arange(12)[None]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss is not None
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_inputs_kept_on_host_change_no_gradient() -> None:
    expected = gradients(build())
    model, kept = build(), []
    prepare_checkpointing(model, is_lora=False)
    checkpoint_first(model, 2)
    keep_inputs(model, on_host)
    save_on_cpu = torch.autograd.graph.save_on_cpu

    class Noted(save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            pack = self.pack_hook

            def note(tensor: Tensor) -> object:
                kept.append(tuple(tensor.shape))
                return pack(tensor)

            self.pack_hook = note

    with mock.patch.object(torch.autograd.graph, "save_on_cpu", Noted):
        got = gradients(model)
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-7)
    # One input [batch, tokens, hidden] for each of the two recomputed layers.
    assert [shape for shape in kept if shape == (1, 12, 16)] == [(1, 12, 16)] * 2


@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
def test_compiled_layers_with_adapted_experts_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    layers = torch._dynamo.config.recompile_limit + 1
    monkeypatch.setitem(models.SHAPES, "tiny-moe", models.SHAPES["tiny-moe"] | {"num_hidden_layers": layers})
    models.write(tmp_path / "model", "tiny-moe", dtype="float32")
    keys = ModelConfig.model_validate({"dtype": "fp32", "lora_target": "all-linear", "lora_rank": 2})
    plain, compiled = (load_policy(str(tmp_path / "model"), keys, seed=0) for _ in range(2))
    compile_layers(compiled.causal)
    for lengths in ([5, 9], [7, 3, 4]):
        inputs = packed_inputs(
            concatenate([np.arange(n, dtype=np.int32) for n in lengths], [np.arange(n) > 0 for n in lengths]), "cpu"
        )
        with torch.no_grad():
            torch.testing.assert_close(compiled(inputs)[0], plain(inputs)[0], rtol=0, atol=1e-6)
        said = [policy(inputs)[0] for policy in (plain, compiled)]
        torch.testing.assert_close(said[1], said[0], rtol=0, atol=1e-6)
        for policy, own in zip((plain, compiled), said, strict=True):
            policy.zero_grad()
            own.sum().backward()
        wanted = {name: one.grad for name, one in plain.named_parameters() if one.grad is not None}
        got = {name: one.grad for name, one in compiled.named_parameters() if one.grad is not None}
        assert wanted.keys() == got.keys() and wanted
        for name, grad in wanted.items():
            torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-6)
