"""A forward pass with exchanged operations: its values are the kernels', its gradients those of transformers."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from roll.config.derived.model_shape import has_known_operations
from roll.config.schema.model import ModelConfig
from roll.data.packing import concatenate
from roll.errors import ConfigError
from roll.models.engine_kernels import EngineHead, Kernels, exchanged, use_engine_kernels
from roll.models.load import load_causal_model
from roll.models.logits import AS_THEY_ARE
from roll.models.packed import PackedPolicy, packed_inputs

LAYERS, VOCABULARY = 2, 50
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 1000.0}
TYPES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
}
"""Keys of a configuration by type of the model."""
LENGTHS = (7, 3, 12)


def rounded(values: Tensor) -> Tensor:
    """Return other values: as a kernel that rounds to bf16 would."""
    return values.bfloat16().float()


def rms(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * states / (states.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


def turned(states: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotate pairs of the two halves of each head as complex numbers."""
    half = states.shape[-1] // 2
    angles = positions[:, None] * base ** -(torch.arange(half) / half)
    spun = torch.complex(states[..., :half], states[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([spun.real, spun.imag], dim=-1)


def attend(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float) -> Tensor:
    """Attend within each sequence, with all scores in memory."""
    assert longest == max(LENGTHS)
    copies, out = query.shape[1] // key.shape[1], torch.empty_like(query)
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        part = slice(begin, end)
        keys, values = (whole[part].repeat_interleave(copies, dim=1) for whole in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[part], keys) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        out[part] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
    return out


PLAIN = Kernels(
    linear=lambda hidden, weight, bias: torch.einsum("...i,oi->...o", hidden, weight) + (0 if bias is None else bias),
    norm=rms,
    add_norm=lambda hidden, residual, weight, epsilon: (rms(hidden + residual, weight, epsilon), hidden + residual),
    gated=lambda both: both.chunk(2, -1)[0].sigmoid() * both.chunk(2, -1)[0] * both.chunk(2, -1)[1],
    rotate=lambda query, key, positions, _, base: (turned(query, positions, base), turned(key, positions, base)),
    attend=attend,
    log_probs=lambda hidden, weight, targets, temperature: (
        (hidden @ weight.t() / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    ),
)


def counted(counts: Counter[str], change: Any = lambda values: values) -> Kernels:
    """Return the plain kernels. Each counts its calls and changes its results."""

    def kernel(name: str) -> Any:
        def call(*given: Any) -> Any:
            assert not torch.is_grad_enabled(), "kernels have no gradient"
            counts[name] += 1
            found = getattr(PLAIN, name)(*given)
            return tuple(map(change, found)) if isinstance(found, tuple) else change(found)

        return call

    return Kernels(**{field.name: kernel(field.name) for field in fields(Kernels)})


@pytest.fixture(params=TYPES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = AutoConfig.for_model(request.param, **SMALL, **TYPES[request.param])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    model.save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, kernels: Kernels | None) -> PackedPolicy:
    model: PreTrainedModel = load_causal_model(str(folder), ModelConfig.model_validate({"dtype": "fp32"}))
    if kernels is None:
        return PackedPolicy(model)
    use_engine_kernels(model, kernels)
    head: Any = model.get_output_embeddings()
    plain = nn.Linear(head.in_features, head.out_features, bias=False)
    plain.weight = head.weight
    model.set_output_embeddings(EngineHead(plain, AS_THEY_ARE, kernels))
    return PackedPolicy(model)


def sequences() -> Any:
    generator = np.random.default_rng(0)
    ids = [generator.integers(0, VOCABULARY, length).astype(np.int32) for length in LENGTHS]
    return concatenate(ids, [np.arange(length) > 1 for length in LENGTHS])


def results(policy: PackedPolicy, temperature: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return log-probs, entropies and the gradients of a loss of both."""
    log_probs, entropy = policy(packed_inputs(sequences(), "cpu", temperature))
    weights = torch.linspace(-1, 1, len(log_probs))
    (log_probs @ weights + entropy @ weights.flip(0)).backward()
    found = {name: one.grad for name, one in policy.named_parameters() if one.grad is not None}
    return log_probs.detach(), entropy.detach(), found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_same_operations_give_the_same_results(folder: Path, temperature: float) -> None:
    counts: Counter[str] = Counter()
    exchanged_, plain = load(folder, counted(counts)), load(folder, None)
    ours, theirs = results(exchanged_, temperature), results(plain, temperature)
    for own, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    assert ours[2].keys() == theirs[2].keys() == dict(plain.named_parameters()).keys()
    for name, gradient in theirs[2].items():
        torch.testing.assert_close(ours[2][name], gradient, rtol=1e-3, atol=1e-4, msg=name)
    per_head = 2 * LAYERS if "qwen3" in type(plain.causal).__name__.lower() else 0
    assert counts == {
        "linear": 7 * LAYERS,
        "norm": 1 + per_head,
        "add_norm": 2 * LAYERS,
        "gated": LAYERS,
        "rotate": LAYERS,
        "attend": LAYERS,
        "log_probs": 1,
    }, "every operation is exchanged"


def test_values_are_those_of_the_kernels(folder: Path) -> None:
    rounding, exact = load(folder, counted(Counter(), rounded)), load(folder, None)
    inputs = packed_inputs(sequences(), "cpu")
    with torch.no_grad():
        scored = rounding(inputs)[0]
    trained = rounding(inputs)[0].detach()
    assert torch.equal(scored, trained), "with and without gradients"
    assert torch.equal(scored, rounded(scored)) and not torch.allclose(scored, exact(inputs)[0], atol=1e-4)


def test_the_gradient_is_the_plain_operation_s() -> None:
    given = torch.linspace(-2, 2, 9, requires_grad=True)
    found = exchanged(torch.exp, lambda values: torch.zeros_like(values), given)
    found.backward(torch.ones(9))
    assert not found.any() and given.grad is not None
    torch.testing.assert_close(given.grad, given.detach().exp())


@pytest.mark.parametrize(
    "changed",
    [
        {"model_type": "gemma2"},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0}},
        {"partial_rotary_factor": 0.5},
        {"sliding_window": 128, "model_type": "mistral"},
        {"sliding_window": 128, "use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_operations_that_are_not_known(changed: dict[str, Any]) -> None:
    known = {"model_type": "qwen2", "hidden_act": "silu", "sliding_window": 128, "use_sliding_window": False}
    assert has_known_operations(known) and not has_known_operations(known | changed)


def test_a_model_with_other_operations_is_refused() -> None:
    config = AutoConfig.for_model("llama", **SMALL, hidden_act="gelu")
    with pytest.raises(ConfigError) as caught:
        use_engine_kernels(AutoModelForCausalLM.from_config(config), PLAIN)
    [fault] = caught.value.faults
    assert (fault.place, fault.code) == ("model_args.engine_kernels", "not_supported")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_causal_model(str(tiny_model), ModelConfig.model_validate({"engine_kernels": True}))
    assert "no GPU" in caught.value.faults[0].problem
