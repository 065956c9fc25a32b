"""Attention over packed sequences through transformers' attention interface.

The caller passes `cu_seq_lens_q` and `max_length_q` to the model as keyword arguments. Tokens attend only within their
own sequence. On CUDA, bf16 and fp16 use torch's variable-length FlashAttention. On the CPU, and in fp32, the packed row
is unpacked into one padded row per sequence during the kernel call. With causal attention, right padding needs no mask,
and the cost per sequence grows with the square of the longest sequence instead of the square of the micro-batch.

The gated delta rule over packed sequences (Yang et al., Gated Delta Networks, 2024), for the hybrid models of
Qwen3.5.

A gated-delta layer passes a state from token to token, and its convolution reads the preceding tokens. Both must be
reset at the start of each sequence. The kernels of flash-linear-attention accept packed sequences, but only on GPUs and
in 16-bit precision. Without the package, in fp32 or on the CPU, each sequence becomes a separate row in a call of
transformers' chunked rule.
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
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from roll.config.derived.model_shape import HYBRIDS, LINEAR
from roll.models.layers import decoder_layers
from roll.models.picture_spans import PictureSpans, seen_with_pictures, with_pictures
from roll.models.sequence_parallel import over_ranks

PACKED = "roll_packed"


def register_packed_kernel() -> str:
    """Register the packed kernel in transformers, and return its name for `attn_implementation`."""
    AttentionInterface.register(PACKED, over_ranks(packed_attention))
    return PACKED


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    spans: PictureSpans | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each packed sequence.

    Args:
        query: [1, heads, T, D].
        key, value: [1, key-value heads, T, D].
        cu_seq_lens_q: int32 [N + 1], start of each sequence, and the end of the last one.
        max_length_q: Number of tokens of the longest sequence.
        sliding_window: Number of tokens that a token sees, itself included. None: all before it.
        softcap: Bound of the scores: each becomes `softcap * tanh(score / softcap)`.
        s_aux: [heads], attention sinks: the score of one more key per head, whose value is zero.
        dropout: Probability with which a weight is dropped. Torch's variable-length kernel cannot drop any.
        spans: The pictures whose placeholders see each other in both directions. None: there are none.

    Returns:
        [1, T, heads, D] and None (no attention weights).
    """
    window = sliding_window if sliding_window is not None and sliding_window < max_length_q else None
    is_plain = softcap is None and s_aux is None
    if is_plain and query.is_cuda and query.dtype != torch.float32 and not dropout:
        q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
        kernel = partial(torch_kernel, scale=scaling)
        size = (-1 if window is None else window - 1, 0)
        out = kernel(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, size)
        return (out if spans is None else with_pictures(out, q, k, v, spans, window, kernel))[None], None
    parts = query, key, value
    return padded_attention(parts, cu_seq_lens_q, max_length_q, window, scaling, softcap, s_aux, dropout, spans), None


def padded_attention(
    parts: tuple[Tensor, Tensor, Tensor],
    offsets: Tensor,
    longest: int,
    window: int | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
    spans: PictureSpans | None,
) -> Tensor:
    """Compute `packed_attention` with one padded row for each sequence.

    Args:
        parts: the query, key and value of `packed_attention`.
        offsets, longest: Its `cu_seq_lens_q` and `max_length_q`.
        window: Number of tokens that a token sees, itself included. None: all before it.
        scaling, softcap, sinks, dropout, spans: As for `packed_attention`, where sinks are `s_aux`.

    Returns:
        [1, T, heads, D].
    """
    tokens, count = parts[0].shape[2], len(offsets) - 1
    rows, columns = packed_positions(offsets, tokens)

    query, key, value = (side_by_side(part, rows, columns, count, longest) for part in parts)
    rows_of = query, key, value
    is_plain = softcap is None and sinks is None
    seen = None if is_plain and window is None and spans is None else seen_keys(longest, window, rows.device)
    if spans is not None and seen is not None:
        seen = seen_with_pictures(seen, window, count, rows, columns, spans)
    if is_plain:
        out = nn.functional.scaled_dot_product_attention(
            *rows_of, attn_mask=seen, dropout_p=dropout, is_causal=seen is None, scale=scaling, enable_gqa=True
        )
    else:
        assert seen is not None
        out = attention_by_scores(*rows_of, seen, scaling or parts[0].shape[-1] ** -0.5, softcap, sinks, dropout)
    return out.transpose(1, 2)[rows, columns][None]


def side_by_side(packed: Tensor, rows: Tensor, columns: Tensor, count: int, longest: int) -> Tensor:
    """Return packed parts [1, heads, T, D] as `count` rows [count, heads, longest, D], padded with zeros.

    Args:
        rows, columns: [T] each, see `packed_positions`.
    """
    heads, _, width = packed.shape[1:]
    laid = packed.new_zeros(count, longest, heads, width)
    laid[rows, columns] = packed[0].transpose(0, 1)
    return laid.transpose(1, 2)


def torch_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    most_queries: int,
    most_keys: int,
    window: tuple[int, int],
    scale: float | None,
) -> Tensor:
    """Compute a `picture_spans.Kernel` with torch's variable-length FlashAttention."""
    offsets, longest = (query_offsets, key_offsets), (most_queries, most_keys)
    out = varlen_attn(query, key, value, *offsets, *longest, scale=scale, window_size=window, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out


def seen_keys(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return for each token of a sequence which tokens it sees: itself and those before it, `window` in all.

    Returns:
        bool [length, length], by query and key.
    """
    places = torch.arange(length, device=device)
    back = places[:, None] - places
    return (back >= 0) if window is None else (back >= 0) & (back < window)


def attention_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention with all scores in memory, which kernels without caps and sinks cannot.

    Args:
        query: [N, heads, L, D].
        key, value: [N, key-value heads, L, D].
        seen: bool [L, L] or [N, 1, L, L], the keys that each query sees.
        scaling, softcap, sinks, dropout: As for `packed_attention`, where sinks are `s_aux`.

    Returns:
        [N, heads, L, D].
    """
    copies = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(copies, dim=1) for part in (key, value))
    scores = (query @ key.transpose(2, 3)).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : seen.shape[-1]].to(value.dtype)
    return nn.functional.dropout(weights, dropout) @ value


def packed_positions(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the sequence index and the position within the sequence of every packed token, [T] each."""
    lengths = offsets.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths, output_size=tokens)
    columns = torch.arange(tokens, device=offsets.device) - offsets[:-1][rows]
    return rows, columns


CHUNK = 64
"""Number of tokens in a chunk of transformers' rule. The rule pads the last chunk of a sequence with zeros."""

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(query, key [1, T, heads, K], value [1, T, heads, V], log decay, beta [1, T, heads], int32 offsets [N + 1]) -> [1, T,
heads, V].
"""
Convolution = Callable[[Tensor, Tensor, str, Tensor], Tensor]
"""(row [1, T, C], weight [C, W], name of the activation, int32 offsets [N + 1]) -> [1, T, C]."""


@dataclass(frozen=True)
class DeltaKernels:
    """Kernels for the delta rule and the convolution of a layer."""

    rule: Rule
    convolution: Convolution


def has_delta_layers(config: PreTrainedConfig) -> bool:
    """Return whether a model is a hybrid with linear attention that `packed_delta` supports."""
    text = config.get_text_config()
    return text.model_type in HYBRIDS and LINEAR in (getattr(text, "layer_types", None) or ())


def delta_layers(model: nn.Module) -> list[nn.Module]:
    """Return the gated-delta modules, in the order of the layers."""
    return [
        mixer for layer in decoder_layers(model) if isinstance(mixer := getattr(layer, "linear_attn", None), nn.Module)
    ]


def pack_delta_layers(model: PreTrainedModel) -> None:
    """Make a hybrid's gated-delta layers reset their state at each packed sequence. Other models stay as they are."""
    if not has_delta_layers(model.config):
        return
    for layer in delta_layers(model):
        layer.forward = MethodType(as_forward(kernels(layer)), layer)


def as_forward(chosen: Callable[[Tensor], DeltaKernels]) -> Callable[..., Tensor]:
    """Return `packed_delta` as a forward method of a layer. `chosen` returns the kernels for the layer's input."""

    def forward(layer: nn.Module, hidden_states: Tensor, *, cu_seq_lens_q: Tensor, **_: Any) -> Tensor:
        return packed_delta(layer, hidden_states, cu_seq_lens_q, chosen(hidden_states))

    return forward


def kernels(layer: nn.Module) -> Callable[[Tensor], DeltaKernels]:
    """Return a function that chooses kernels by the layer's input.

    They are those of flash-linear-attention in 16 bits on a GPU, if the package is installed, and plain torch
    otherwise.
    """
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
    """Return kernels excluded from torch.compile: they depend on sequence bounds or are compiled already."""
    return DeltaKernels(
        cast(Rule, torch.compiler.disable(rule)), cast(Convolution, torch.compiler.disable(convolution))
    )


def packed_delta(layer: Any, hidden: Tensor, offsets: Tensor, with_: DeltaKernels) -> Tensor:
    """Compute transformers' `Qwen3_5GatedDeltaNet.forward` over packed sequences, without a cache.

    Args:
        layer: The gated-delta module.
        hidden: [1, T, H].
        offsets: int32 [N + 1], start of each sequence, and the end of the last one.
        with_: The kernels to use.

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
    # In fp32, because the exponential may overflow in 16-bit precision.
    decay = -layer.A_log.float().exp() * nn.functional.softplus(layer.in_proj_a(hidden).float() + layer.dt_bias)
    read = with_.rule(query, key, value, decay, layer.in_proj_b(hidden).sigmoid(), offsets)
    gate = layer.in_proj_z(hidden).reshape(-1, layer.head_v_dim)
    return layer.out_proj(layer.norm(read.reshape(-1, layer.head_v_dim), gate).reshape(1, tokens, -1))


def rule_by_chunks(
    rule: Callable[..., tuple[Tensor, Any]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    offsets: Tensor,
) -> Tensor:
    """Apply a rule without support for packing as a `Rule`. Each call processes all sequences with the same number of
    chunks, as rows.

    A row is padded only to whole chunks, as the rule would do itself. Padding follows a row's last token, so it does
    not affect outputs.
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
    """Compute a causal depthwise `Convolution`.

    It is the fp32 weighted sum of a token's row and the W - 1 rows before it in its sequence, followed by the
    activation.
    """
    tokens, width = row.shape[1], weight.shape[1]
    _, columns = packed_positions(offsets, tokens)
    values, weights = row.float(), weight.float()
    out = values * weights[:, -1]
    for back in range(1, width):
        earlier = nn.functional.pad(values, (0, 0, back, 0))[:, :tokens]
        out = out + torch.where((columns >= back)[:, None], earlier, 0) * weights[:, -1 - back]
    return ACT2FN[activation](out.to(row.dtype))


def fused_rule(kernel: Callable[..., tuple[Tensor, Any]]) -> Rule:
    """Return flash-linear-attention's `chunk_gated_delta_rule` as a `Rule`."""

    def rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, offsets: Tensor) -> Tensor:
        return kernel(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=offsets)[0]

    return rule


def fused_convolution(kernel: Callable[..., tuple[Tensor, Any]]) -> Convolution:
    """Return flash-linear-attention's `causal_conv1d` as a `Convolution`."""

    def convolve(row: Tensor, weight: Tensor, activation: str, offsets: Tensor) -> Tensor:
        return kernel(row, weight, activation=activation, cu_seqlens=offsets)[0]

    return convolve
