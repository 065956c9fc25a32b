"""Layers that are recomputed with their inputs in host memory."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from roll.models.layers import checkpoint_first, keep_inputs, on_host, prepare_checkpointing


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


def test_inputs_in_host_memory_change_no_gradient_and_only_recomputed_layers_leave_theirs_there() -> None:
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
    # One input of each: [batch, tokens, hidden].
    assert [shape for shape in kept if shape == (1, 12, 16)] == [(1, 12, 16)] * 2
