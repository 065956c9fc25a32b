"""Model FLOPs, compared with torch's FLOP counter for forward and backward passes."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from roll.config.derived.flops import gpu_rates
from roll.config.derived.model_shape import ModelShape, shape_of
from roll.models.flops import TrainingFlops

CONFIG = Qwen2Config(
    hidden_size=128,
    num_hidden_layers=6,
    vocab_size=1024,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
RANK = 16


def shape() -> ModelShape:
    found = shape_of(CONFIG.to_dict())
    assert found
    return found


def counted(model: nn.Module, length: int) -> int:
    """Count the FLOPs of a forward and a backward pass over one sequence."""
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=torch.arange(length)[None] % CONFIG.vocab_size).logits.sum().backward()
    return counter.get_total_flops()


def causal_model() -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM._from_config(CONFIG, attn_implementation="eager")


def whole_attention(length: int) -> float:
    """Return the FLOPs that torch counts for attention products: over all pairs of tokens, including those that the
    causal mask hides.
    """
    return 3 * shape().attending_flops * length**2


@pytest.mark.parametrize("length", [8, 512])
def test_of_a_model_that_learns_whole(length: int) -> None:
    count = shape().parameters
    expected = counted(causal_model(), length)
    # Biases and norms take no part in matrix products. They are less than 1% of the parameters.
    assert TrainingFlops(count, count).of([length]) + whole_attention(length) == pytest.approx(expected, rel=0.01)


def test_of_a_lora_adapter() -> None:
    length = 64
    model = get_peft_model(causal_model(), LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.enable_input_require_grads()
    count, adapter = shape().parameters, shape().adapter_parameters("all-linear", RANK)
    expected = counted(model, length)
    assert TrainingFlops(count + adapter, adapter).of([length]) + whole_attention(length) == pytest.approx(
        expected, rel=0.02
    )


def test_attention_flops_are_causal_and_per_sequence() -> None:
    count = shape().parameters
    flops = TrainingFlops(count, count, shape().attending_flops)
    products = 6 * count * 96
    assert flops.of([96]) - products == whole_attention(96) / 2
    assert flops.of([32, 64]) - products == (whole_attention(32) + whole_attention(64)) / 2


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA L40", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_a_device_is_known_by_its_name(name: str, peak: float | None) -> None:
    found = gpu_rates(name)
    assert (found and found.bf16_peak) == peak
