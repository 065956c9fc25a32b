"""Layers in 4 bits: their rounding and their bytes, which layers there are, and the policy of engines and exports."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from roll.config.plan.memory import BITS
from roll.config.schema.model import ModelConfig, QuantizedBase
from roll.data.packing import concatenate
from roll.errors import ConfigError
from roll.models.load import add_lora, load_causal_model, load_policy
from roll.models.offload import Offload, storages
from roll.models.packed import PackedPolicy, packed_inputs
from roll.models.quantized import FrozenLinear, quantize_layers, round_layers, rounded, scales, whole
from roll.models.value import load_values
from roll.models.weights import WeightView

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of NF4 (Dettmers et al., QLoRA, 2023, appendix E)."""
TOKENS = [np.random.default_rng(number).integers(0, 250, length) for number, length in enumerate((12, 18))]


def settings(kind: str | None, dtype: str = "fp32", target: str = "all-linear") -> ModelConfig:
    adapter = {"lora_rank": 4, "lora_target": target, "dtype": dtype, "quantized_base": kind}
    return ModelConfig.model_validate(adapter)


def log_probs(policy: PackedPolicy) -> Tensor:
    batch = concatenate([ids.astype(np.int32) for ids in TOKENS], [np.arange(len(ids)) > 0 for ids in TOKENS])
    return policy(packed_inputs(batch, "cpu"))[0]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 30


def test_weights_are_the_nearest_values_of_their_block() -> None:
    matrix = drawn(0, 96, 128)
    blocks = matrix.double().view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    values = torch.tensor(NF4, dtype=torch.float64)
    nearest = values[(blocks / largest - values[:, None, None]).abs().argmin(0)]
    expected = (nearest * largest).view(96, 128).float()
    torch.testing.assert_close(whole(rounded(matrix, "nf4")), expected, rtol=1e-5, atol=0)
    apart = (whole(rounded(matrix, "nf4_double")) - expected).view(-1, 64).abs() / largest
    assert 0 < apart.max() < 0.02  # the scales have 8 bits


@pytest.mark.parametrize("kind", ["nf4", "nf4_double"])
def test_bytes_are_those_of_the_plan(kind: QuantizedBase) -> None:
    held = rounded(drawn(0, 512, 1024), kind)
    state: Any = held.quant_state
    parts = [held, state.absmax] + ([state.state2.absmax] if state.nested else [])
    assert 8 * sum(part.nbytes for part in parts) / (512 * 1024) == pytest.approx(BITS[kind], rel=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rounding_repeats_bit_for_bit(dtype: str, tiny_model: Path) -> None:
    """A resumed run and an export compute the weights again."""
    first, second = (load_policy(str(tiny_model), settings("nf4_double", dtype), seed=seed) for seed in (1, 2))
    plain = load_causal_model(str(tiny_model), settings(None, dtype), packed=False)
    round_layers(plain, "nf4_double")
    view, other = WeightView(first.model), WeightView(second.model)  # pyright: ignore[reportArgumentType]
    assert {spec.name: spec.shape for spec in view.model_specs()} == {
        name: tuple(one.shape) for name, one in plain.named_parameters()
    }
    for name, one in plain.named_parameters():
        mine = view.model_tensors([name])[name]
        assert torch.equal(mine, other.model_tensors([name])[name]) and torch.equal(mine, one), name
        assert mine.dtype == one.dtype


def test_linear_layers_of_the_decoder_are_quantized(tiny_model: Path) -> None:
    given = settings("nf4", target="q_proj")
    model = load_causal_model(str(tiny_model), given, packed=False)
    linear = {name for name, one in model.named_modules() if isinstance(one, nn.Linear) and ".layers." in name}
    before = dict(model.named_parameters())
    adapted = add_lora(model, given, seed=0)
    found = {name.replace(".base_layer", "") for name, one in model.named_modules() if isinstance(one, FrozenLinear)}
    assert found == linear and len(linear) == 28
    same = [name for name, one in model.named_parameters() if one is before.get(name)]
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} < set(same)
    assert all(one.requires_grad == (".lora_" in name) for name, one in adapted.named_parameters())
    assert not any("absmax" in name for name in adapted.state_dict())


def test_fused_experts_are_refused() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "moe_intermediate_size": 8,
        "head_dim": 4,
        "vocab_size": 32,
    }
    config = Qwen3MoeConfig(num_hidden_layers=1, num_attention_heads=4, num_experts=4, **sizes)
    with pytest.raises(ConfigError) as raised:
        quantize_layers(AutoModelForCausalLM.from_config(config), "nf4")
    assert "matrix 0.mlp" in raised.value.faults[0].problem


def test_scores_without_gradients_are_those_with(tiny_model: Path) -> None:
    """On some CPUs bitsandbytes would compute in bf16 in evaluation mode, and change the weights."""
    policy = load_policy(str(tiny_model), settings("nf4"), seed=0)
    trained = log_probs(policy.train())
    with torch.no_grad():
        torch.testing.assert_close(log_probs(policy.eval()), trained.detach(), rtol=0, atol=1e-6)
    assert torch.equal(log_probs(policy.train()), trained)


def test_policy_starts_from_rounded_weights(tiny_model: Path) -> None:
    policy = load_policy(str(tiny_model), settings("nf4"), seed=0)
    plain = load_causal_model(str(tiny_model), settings(None))
    unrounded = log_probs(PackedPolicy(deepcopy(plain)))
    round_layers(plain, "nf4")
    expected = log_probs(PackedPolicy(plain))
    torch.testing.assert_close(log_probs(policy), expected, rtol=0, atol=1e-5)
    with policy.model.disable_adapter():  # pyright: ignore[reportCallIssue]
        torch.testing.assert_close(log_probs(policy), expected, rtol=0, atol=1e-5)
    assert (unrounded - expected).abs().max() > 0.01


def test_value_model_is_quantized_without_its_head(tiny_model: Path) -> None:
    values = load_values(str(tiny_model), settings("nf4"), seed=0)
    assert sum(isinstance(one, FrozenLinear) for one in values.modules()) == 28
    assert {name for name, one in values.causal.named_parameters() if one.requires_grad and "lora_" not in name} == {
        "score.weight"
    }


def test_offloading_returns_the_scales(tiny_model: Path) -> None:
    policy = load_policy(str(tiny_model), settings("nf4_double"), seed=0)
    expected, offload = log_probs(policy).detach(), Offload("cpu")
    held = [*policy.parameters(), *policy.buffers(), *scales(policy)]
    assert len(scales(policy)) == 28 * 5
    offload.offload(held)
    assert not any(storage.nbytes() for storage in storages(scales(policy), "cpu"))
    offload.onload()
    assert torch.equal(log_probs(policy), expected)
