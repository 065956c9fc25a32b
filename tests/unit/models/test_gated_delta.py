"""Hybrid models on packed sequences, compared with a recurrence in float64 and with transformers on each sequence
alone.
"""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5

from roll.config.schema.model import ModelConfig
from roll.data.packing import concatenate
from roll.models.attention import (
    DeltaKernels,
    convolution_by_shifts,
    delta_layers,
    fused_convolution,
    fused_rule,
    packed_delta,
    rule_by_chunks,
)
from roll.models.layers import compile_layers
from roll.models.load import load_policy
from roll.models.packed import PackedPolicy, packed_inputs
from roll.models.value import load_values
from roll.types import Sequences
from tests.hybrids import Kind, build_hybrid, write_hybrid

FP32 = ModelConfig.model_validate({"dtype": "fp32"})
LENGTHS = [5, 2, 64, 65, 130, 3, 70]
"""Lengths shorter than the convolution, multiples of the chunk size 64 and others. Several have the same number of
chunks.
"""
CHUNKED = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
PLAIN = DeltaKernels(partial(rule_by_chunks, CHUNKED), convolution_by_shifts)


@pytest.fixture(scope="module", params=["dense", "experts", "seeing"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrids") / kind, kind)


def batch(lengths: list[int], seed: int = 0) -> Sequences:
    """Return random sequences. All tokens except the first of each sequence are scored."""
    generator = np.random.default_rng(seed)
    ids = [generator.integers(0, 250, length).astype(np.int32) for length in lengths]
    return concatenate(ids, [np.arange(length) > 0 for length in lengths])


def parts(sequences: Sequences) -> list[Tensor]:
    """Return the token ids of each sequence, [1, length]."""
    spans = zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True)
    return [torch.from_numpy(sequences.token_ids[begin:end]).long()[None] for begin, end in spans]


def log_probs_alone(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """Return log-probs [S] from the transformers forward pass of each sequence."""
    said = []
    for ids in parts(sequences):
        log_p = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        said.append(log_p.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(said)


def one_layer() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a gated delta layer, its input [1, T, H] and the offsets of the sequences."""
    layer = delta_layers(build_hybrid())[1]
    hidden = torch.randn(1, sum(LENGTHS), 64, generator=torch.Generator().manual_seed(1))
    return layer, hidden, torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)


def recurrence(layer: Any, hidden: Tensor) -> Tensor:
    """Return the output [T, H] for one sequence [T, H], token by token, in the dtype of the input (Yang et al., 2024,
    equation 10).
    """
    heads, keys, values = layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    row, width = hidden @ layer.in_proj_qkv.weight.T, layer.conv_kernel_size
    padded = torch.cat([row.new_zeros(width - 1, row.shape[1]), row])
    mixed = (padded.unfold(0, width, 1) * layer.conv1d.weight[:, 0]).sum(-1)
    q, k, v = nn.functional.silu(mixed).split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    q, k = (part.reshape(len(row), -1, keys).repeat_interleave(heads // layer.num_k_heads, 1) for part in (q, k))
    q, k = (part / (part.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    beta = (hidden @ layer.in_proj_b.weight.T).sigmoid()
    decay = (-layer.A_log.exp() * nn.functional.softplus(hidden @ layer.in_proj_a.weight.T + layer.dt_bias)).exp()
    state, read = row.new_zeros(heads, values, keys), []
    for query, key, value, share, rate in zip(q, k, v.reshape(len(row), heads, values), decay, beta, strict=True):
        kept = state * share[:, None, None]
        wrong = value - (kept @ key[:, :, None])[..., 0]
        state = kept + (rate[:, None] * wrong)[:, :, None] * key[:, None]
        read.append((state @ query[:, :, None])[..., 0] / keys**0.5)
    out = torch.stack(read)
    normed = out * (out.pow(2).mean(-1, keepdim=True) + layer.layer_norm_epsilon).rsqrt() * layer.norm.weight
    gate = nn.functional.silu((hidden @ layer.in_proj_z.weight.T).reshape(out.shape))
    return (normed * gate).reshape(len(row), -1) @ layer.out_proj.weight.T


def test_gated_delta_layer_matches_recurrence_per_sequence() -> None:
    layer, hidden, offsets = one_layer()
    exact = delta_layers(build_hybrid().double())[1]
    direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    inputs = [hidden.clone().requires_grad_(), hidden.double().requires_grad_()]
    said = packed_delta(layer, inputs[0], offsets, PLAIN)
    expected = torch.cat([recurrence(exact, part) for part in inputs[1][0].split(LENGTHS)])[None]
    torch.testing.assert_close(said.double(), expected, rtol=1e-5, atol=1e-5)
    for out in (said, expected):
        (out * direction.to(out.dtype)).sum().backward()
    wanted = dict(exact.named_parameters()) | {"hidden": inputs[1]}
    for name, parameter in (dict(layer.named_parameters()) | {"hidden": inputs[0]}).items():
        grad, theirs = parameter.grad, wanted[name].grad
        assert grad is not None and theirs is not None
        assert (grad.double() - theirs).norm() < 1e-5 * theirs.norm(), name


def test_packed_layer_matches_single_sequences_and_transformers(folder: Path) -> None:
    sequences = batch(LENGTHS)
    policy = load_policy(str(folder), FP32, seed=0)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    packed, _ = policy(packed_inputs(sequences, "cpu"))
    one_by_one = torch.cat([policy(packed_inputs(batch_of(ids), "cpu"))[0] for ids in parts(sequences)])
    expected = log_probs_alone(plain, sequences)
    torch.testing.assert_close(packed, one_by_one, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-5)
    weights = torch.linspace(-1, 1, len(packed))
    grads = [gradients(model, (said * weights).sum()) for model, said in ((policy.causal, packed), (plain, expected))]
    alone = gradients(policy.causal, (one_by_one * weights).sum())
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        for other in (grads[1][name], alone[name]):
            assert (grad - other).norm() < 1e-4 * max(float(other.norm()), 1e-2), name


def batch_of(ids: Tensor) -> Sequences:
    """Return a batch with one sequence."""
    return concatenate([ids[0].numpy().astype(np.int32)], [np.arange(ids.shape[1]) > 0])


def gradients(model: nn.Module, objective: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the parameters on which the objective depends."""
    model.zero_grad()
    objective.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dense"], scope="module")
def test_compiled_layers_agree_for_any_sequence_count(folder: Path) -> None:
    plain, compiled = (load_policy(str(folder), FP32, seed=0) for _ in range(2))
    compile_layers(compiled.causal)
    for lengths in (LENGTHS, [3, 4], [65, 130]):
        inputs = packed_inputs(batch(lengths), "cpu")
        said = [policy(inputs)[0] for policy in (plain, compiled)]
        torch.testing.assert_close(said[0], said[1], rtol=0, atol=1e-5)
        wanted, grads = (
            gradients(policy.causal, own.sum()) for policy, own in zip((plain, compiled), said, strict=True)
        )
        assert all((grads[name] - grad).norm() < 1e-4 * max(float(grad.norm()), 1e-2) for name, grad in wanted.items())


@torch.no_grad()
def test_no_sequence_reads_another(folder: Path) -> None:
    policy = load_policy(str(folder), FP32, seed=0)
    one, other = batch(LENGTHS), batch(LENGTHS, seed=1)
    kept = slice(int(one.offsets[2]), int(one.offsets[4]))
    mixed = other.token_ids.copy()
    mixed[kept] = one.token_ids[kept]
    scored = slice(sum(LENGTHS[:2]) - 2, sum(LENGTHS[:4]) - 4)
    said = [
        policy(packed_inputs(Sequences(ids, one.offsets, one.response_mask), "cpu"))[0]
        for ids in (one.token_ids, mixed)
    ]
    torch.testing.assert_close(said[0][scored], said[1][scored], rtol=0, atol=1e-6)
    assert (
        said[0][-LENGTHS[-1] + 1 :] - said[1][-LENGTHS[-1] + 1 :]
    ).abs().max() > 0.1  # the tokens of this sequence changed


def varlen_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool, cu_seqlens: Tensor
) -> Any:
    """Apply the rule to each sequence, as the documentation of flash-linear-attention specifies for
    `chunk_gated_delta_rule`.
    """
    recurrent = inspect.unwrap(modeling_qwen3_5.torch_recurrent_gated_delta_rule)
    spans = [slice(begin, end) for begin, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)]
    own = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    read = [recurrent(q[:, s], k[:, s], v[:, s], g=g[:, s], beta=beta[:, s], **own)[0] for s in spans]
    return torch.cat(read, dim=1), None


def varlen_convolution(x: Tensor, weight: Tensor, activation: str, cu_seqlens: Tensor) -> tuple[Tensor, None]:
    """Convolve each sequence of x [1, T, C] with weight [C, W], as flash-linear-attention documents for
    `causal_conv1d`.
    """
    assert activation == "silu"
    out = []
    for begin, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        own = nn.functional.pad(x[:, begin:end].transpose(1, 2), (weight.shape[1] - 1, 0))
        out.append(nn.functional.conv1d(own, weight[:, None], groups=len(weight)).transpose(1, 2))
    return nn.functional.silu(torch.cat(out, dim=1)), None


@torch.no_grad()
def test_kernels_receive_starts_of_sequences() -> None:
    layer, hidden, offsets = one_layer()
    fused = DeltaKernels(fused_rule(varlen_rule), fused_convolution(varlen_convolution))
    expected = packed_delta(layer, hidden, offsets, PLAIN)
    torch.testing.assert_close(packed_delta(layer, hidden, offsets, fused), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["dense", "seeing"], scope="module")  # transformers has no classifier with experts
def test_values_are_those_of_transformers_classifier(folder: Path) -> None:
    sequences = batch(LENGTHS)
    values = load_values(str(folder), FP32, seed=0)
    with torch.no_grad():
        values.causal.score.weight.normal_(generator=torch.Generator().manual_seed(1))  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    plain = AutoModelForSequenceClassification.from_config(
        values.causal.config, dtype=torch.float32, attn_implementation="sdpa"
    )
    plain.load_state_dict(values.causal.state_dict())
    (said,) = values(packed_inputs(sequences, "cpu"))
    states = torch.cat(
        [plain.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1] for ids in parts(sequences)]
    )
    torch.testing.assert_close(said, (states @ plain.score.weight.T)[:, 0], rtol=1e-5, atol=2e-5)
    own = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    assert all(
        torch.equal(parameter, own[name])
        for name, parameter in values.causal.named_parameters()
        if name != "score.weight"
    )


def test_adapters_learn_on_both_kinds_of_layers(folder: Path) -> None:
    targets = "q_proj,k_proj,v_proj,o_proj,in_proj_qkv,in_proj_z,in_proj_a,in_proj_b,out_proj"
    policy = load_policy(
        str(folder), ModelConfig.model_validate({"dtype": "fp32", "lora_target": targets, "lora_rank": 4}), seed=0
    )
    policy(packed_inputs(batch(LENGTHS), "cpu"))[0].sum().backward()
    learning = {name.split(".")[-4]: grad for name, grad in named_grads(policy) if ".lora_B." in name}
    assert set(learning) == set(targets.split(","))
    assert all(grad.abs().max() > 0 for grad in learning.values())


def named_grads(policy: PackedPolicy) -> list[tuple[str, Tensor]]:
    return [(name, parameter.grad) for name, parameter in policy.named_parameters() if parameter.grad is not None]
