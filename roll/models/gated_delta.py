"""The gated delta rule over packed sequences (Yang et al., Gated Delta Networks, 2024), for Qwen3.5's hybrids.

Such a layer passes a state from token to token, and its convolution reads the tokens before: both must start anew with each sequence.
The kernels of flash-linear-attention take packed sequences, on GPUs and in 16 bits. Without the package, in fp32 and on the CPU each
sequence is a row of its own in a call of transformers' chunked rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from roll.config.derived.model_shape import HYBRIDS, LINEAR
from roll.models.attention import positions
from roll.models.layers import decoder_layers

CHUNK = 64
"""Number of tokens in a chunk of transformers' rule, which pads the last chunk of a sequence with zeros."""

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Query, key [1, T, heads, K], value [1, T, heads, V], log of the decay and beta [1, T, heads], int32 offsets [N + 1]: [1, T, heads, V]."""
Convolution = Callable[[Tensor, Tensor, str, Tensor], Tensor]
"""Row [1, T, C], weight [C, W], the activation's name, int32 offsets [N + 1]: [1, T, C]."""


@dataclass(frozen=True)
class DeltaKernels:
    """Kernels for a layer's state and convolution."""

    rule: Rule
    convolution: Convolution


def has_delta_layers(config: PreTrainedConfig) -> bool:
    """Whether a model is a hybrid whose linear attention `packed_delta` computes."""
    text = config.get_text_config()
    return text.model_type in HYBRIDS and LINEAR in (getattr(text, "layer_types", None) or ())


def delta_layers(model: nn.Module) -> list[nn.Module]:
    """Return the gated-delta mixers in the order of the layers."""
    return [mixer for layer in decoder_layers(model) if isinstance(mixer := getattr(layer, "linear_attn", None), nn.Module)]


def pack_delta_layers(model: PreTrainedModel) -> None:
    """Let a hybrid's layers start anew with each packed sequence. Other models stay as they are."""
    if not has_delta_layers(model.config):
        return
    for layer in delta_layers(model):
        layer.forward = MethodType(as_forward(kernels(layer)), layer)


def as_forward(chosen: Callable[[Tensor], DeltaKernels]) -> Callable[..., Tensor]:
    """Run `packed_delta` as a layer's method, with the kernels for its input."""

    def forward(layer: nn.Module, hidden_states: Tensor, *, cu_seq_lens_q: Tensor, **_: Any) -> Tensor:
        return packed_delta(layer, hidden_states, cu_seq_lens_q, chosen(hidden_states))

    return forward


def kernels(layer: nn.Module) -> Callable[[Tensor], DeltaKernels]:
    """Return the choice of kernels for a layer's input: flash-linear-attention takes 16 bits on a GPU and nothing else."""
    rule = inspect.unwrap(import_module(type(layer).__module__).torch_chunk_gated_delta_rule)
    plain = uncompiled(partial(rule_by_chunks, rule), convolution_by_shifts)
    if not torch.cuda.is_available() or find_spec("fla") is None:
        return lambda hidden: plain
    fused = uncompiled(
        fused_rule(import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule),
        fused_convolution(import_module("fla.modules.convolution").causal_conv1d),
    )
    return lambda hidden: fused if hidden.is_cuda and hidden.dtype != torch.float32 else plain


def uncompiled(rule: Rule, convolution: Convolution) -> DeltaKernels:
    """Kernels that compiled layers call uncompiled, because they depend on the sequences' starts or are compiled already."""
    return DeltaKernels(cast(Rule, torch.compiler.disable(rule)), cast(Convolution, torch.compiler.disable(convolution)))


def packed_delta(layer: Any, hidden: Tensor, offsets: Tensor, with_: DeltaKernels) -> Tensor:
    """`Qwen3_5GatedDeltaNet.forward` of transformers, without a cache, over packed sequences.

    Args:
        hidden: [1, T, H].
        offsets: int32 [N + 1], where each sequence starts and the last one ends.

    Returns:
        [1, T, H].
    """
    tokens = hidden.shape[1]
    mixed = with_.convolution(layer.in_proj_qkv(hidden), layer.conv1d.weight.squeeze(1), layer.activation, offsets)
    query, key, value = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    query, key = (part.reshape(1, tokens, -1, layer.head_k_dim) for part in (query, key))
    copies = layer.num_v_heads // layer.num_k_heads
    if copies > 1:
        query, key = query.repeat_interleave(copies, dim=2), key.repeat_interleave(copies, dim=2)
    value = value.reshape(1, tokens, -1, layer.head_v_dim)
    # In fp32: in 16 bits the exponential may overflow.
    decay = -layer.A_log.float().exp() * nn.functional.softplus(layer.in_proj_a(hidden).float() + layer.dt_bias)
    read = with_.rule(query, key, value, decay, layer.in_proj_b(hidden).sigmoid(), offsets)
    gate = layer.in_proj_z(hidden).reshape(-1, layer.head_v_dim)
    return layer.out_proj(layer.norm(read.reshape(-1, layer.head_v_dim), gate).reshape(1, tokens, -1))


def rule_by_chunks(
    rule: Callable[..., tuple[Tensor, Any]], query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, offsets: Tensor
) -> Tensor:
    """Make a `Rule` from one without packing: sequences with the same number of chunks are the rows of a call.

    It is given no token more than it would fill up itself. What fills a row up follows its last token, so nothing reads it.
    """
    lengths = offsets.diff()
    chunks = (lengths + CHUNK - 1) // CHUNK
    out = torch.zeros_like(value)
    for count in torch.unique(chunks).tolist():
        begins, own = offsets[:-1][chunks == count], lengths[chunks == count]
        columns = torch.arange(count * CHUNK, device=offsets.device)
        inside = columns < own[:, None]
        where = (begins[:, None] + columns).clamp(max=query.shape[1] - 1)
        q, k, v = (torch.where(inside[..., None, None], part[0][where], 0) for part in (query, key, value))
        g, b = (torch.where(inside[..., None], part[0][where], 0) for part in (decay, beta))
        read = rule(q, k, v, g=g, beta=b, use_qk_l2norm_in_kernel=True)[0]
        out[0, where[inside]] = read[inside]
    return out


def convolution_by_shifts(row: Tensor, weight: Tensor, activation: str, offsets: Tensor) -> Tensor:
    """A causal depthwise `Convolution`: the weighted sum, in fp32, of a token's row and the rows before it in its sequence."""
    tokens, width = row.shape[1], weight.shape[1]
    _, columns = positions(offsets, tokens)
    values, weights = row.float(), weight.float()
    out = values * weights[:, -1]
    for back in range(1, width):
        earlier = nn.functional.pad(values, (0, 0, back, 0))[:, :tokens]
        out = out + torch.where((columns >= back)[:, None], earlier, 0) * weights[:, -1 - back]
    return ACT2FN[activation](out.to(row.dtype))


def fused_rule(kernel: Callable[..., tuple[Tensor, Any]]) -> Rule:
    """The `Rule` of flash-linear-attention's `chunk_gated_delta_rule`."""

    def rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, offsets: Tensor) -> Tensor:
        return kernel(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=offsets)[0]

    return rule


def fused_convolution(kernel: Callable[..., tuple[Tensor, Any]]) -> Convolution:
    """The `Convolution` of flash-linear-attention's `causal_conv1d`."""

    def convolve(row: Tensor, weight: Tensor, activation: str, offsets: Tensor) -> Tensor:
        return kernel(row, weight, activation=activation, cu_seqlens=offsets)[0]

    return convolve
