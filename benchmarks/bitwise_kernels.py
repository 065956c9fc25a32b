"""The forward pass of a Qwen2 over packed sequences, with each operation exchangeable: torch's or vLLM's.

`PLAIN` computes what transformers computes, bit for bit. `ladder` exchanges one operation after the other for the
kernel of a batch-invariant engine of vLLM (`roll.models.engine_kernels`). There is no backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from roll.models import engine_kernels
from roll.models.attention import packed_attention
from roll.models.packed import PackedInputs

Note = Callable[[str, Tensor], None]
"""Is called with the name of an operation and its result."""


def ignore(name: str, result: Tensor) -> None:
    """Keep no result."""


@dataclass(frozen=True)
class Kernels:
    """The operations of a forward pass. T tokens, H is the model's width, D that of a head."""

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """Input [T, I], weight [O, I] and bias [O] or None -> [T, O]."""
    norm: Callable[[Tensor, Any], Tensor]
    """States [T, H] and a norm's module -> [T, H]."""
    add_norm: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]
    """States [T, H], residual [T, H] and a norm's module -> the normalised sum, and the sum."""
    gated: Callable[[Tensor], Tensor]
    """Gate and up-projection side by side, [T, 2 I] -> [T, I]."""
    rotate: Callable[[Tensor, Tensor, PackedInputs, Any], tuple[Tensor, Tensor]]
    """Queries [T, heads, D], keys [T, key-value heads, D], the inputs and the rotary module -> both, rotated."""
    attend: Callable[[Tensor, Tensor, Tensor, PackedInputs, float], Tensor]
    """Queries, keys and values, the inputs and the scale -> [T, heads, D]."""
    log_probs: Callable[[Tensor, Tensor, Any], Tensor]
    """States [S, H], targets [S] and the head of a `PackedPolicy` -> fp32 [S]."""


@torch.no_grad()
def scored(causal: Any, inputs: PackedInputs, kernels: Kernels, note: Note = ignore) -> Tensor:
    """Return the log-probs of the scored tokens, fp32 [S], of a Qwen2 with the head of a `PackedPolicy`."""
    hidden = states(causal.model, inputs, kernels, note)
    targets = inputs.token_ids[inputs.scored]
    return kernels.log_probs(hidden.index_select(0, inputs.scored - 1), targets, causal.get_output_embeddings())


def states(model: Any, inputs: PackedInputs, kernels: Kernels, note: Note) -> Tensor:
    """Return the normalised states of the last layer, [T, H]."""
    residual = model.embed_tokens(inputs.token_ids)
    note("embedding", residual)
    hidden = kernels.norm(residual, model.layers[0].input_layernorm)
    norms = [*(layer.input_layernorm for layer in model.layers[1:]), model.norm]
    for number, (layer, norm) in enumerate(zip(model.layers, norms, strict=True)):
        before = f"layer {number}, "

        def noted(name: str, result: Tensor, before: str = before) -> None:
            note(before + name, result)

        noted("norm", hidden)
        attended = attention(layer.self_attn, hidden, inputs, kernels, model.rotary_emb, noted)
        hidden, residual = kernels.add_norm(attended, residual, layer.post_attention_layernorm)
        noted("second norm", hidden)
        products = [kernels.linear(hidden, part.weight, None) for part in (layer.mlp.gate_proj, layer.mlp.up_proj)]
        both = torch.cat(products, dim=-1)
        noted("gate and up", both)
        inner = kernels.gated(both)
        noted("activation", inner)
        out = kernels.linear(inner, layer.mlp.down_proj.weight, None)
        noted("down", out)
        hidden, residual = kernels.add_norm(out, residual, norm)
    note("last norm", hidden)
    return hidden


def attention(layer: Any, hidden: Tensor, inputs: PackedInputs, kernels: Kernels, rotary: Any, note: Note) -> Tensor:
    """Return the output of a layer's attention, [T, H]."""
    parts = [kernels.linear(hidden, part.weight, part.bias) for part in (layer.q_proj, layer.k_proj, layer.v_proj)]
    note("queries, keys, values", torch.cat(parts, dim=-1))
    query, key, value = (part.view(len(hidden), -1, layer.head_dim) for part in parts)
    query, key = kernels.rotate(query, key, inputs, rotary)
    note("rotation", torch.cat([query.flatten(1), key.flatten(1)], dim=-1))
    out = kernels.attend(query, key, value, inputs, layer.scaling).flatten(1)
    note("attention", out)
    out = kernels.linear(out, layer.o_proj.weight, None)
    note("output", out)
    return out


def plain_add_norm(hidden: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum, and the sum, as transformers computes them."""
    total = residual + hidden
    return norm(total), total


def plain_rotate(query: Tensor, key: Tensor, inputs: PackedInputs, rotary: Any) -> tuple[Tensor, Tensor]:
    """Rotate with the cosines of transformers."""
    cos, sin = rotary(query, inputs.position_ids[None])
    query, key = apply_rotary_pos_emb(query[None], key[None], cos, sin, unsqueeze_dim=2)
    return query[0], key[0]


def plain_attend(query: Tensor, key: Tensor, value: Tensor, inputs: PackedInputs, scale: float) -> Tensor:
    """Attend with roll's packed kernel."""
    given = {"cu_seq_lens_q": inputs.cu_seq_lens, "max_length_q": inputs.max_length, "scaling": scale}
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    return packed_attention(nn.Module(), query, key, value, None, **given)[0][0]


def plain_log_probs(hidden: Tensor, targets: Tensor, head: Any) -> Tensor:
    """Return the log-probs of roll's head, whose logits are fp32."""
    return head(hidden, targets)[0]


PLAIN = Kernels(
    linear=nn.functional.linear,
    norm=lambda hidden, norm: norm(hidden),
    add_norm=plain_add_norm,
    gated=engine_kernels.plain_gated,
    rotate=plain_rotate,
    attend=plain_attend,
    log_probs=plain_log_probs,
)


def ladder() -> list[tuple[str, Kernels]]:
    """Return kernels by name, each with one operation more of vLLM's. They need a GPU, and `VLLM_BATCH_INVARIANT=1`."""
    steps: list[tuple[str, dict[str, Any]]] = [
        ("products", {"linear": engine_kernels.engine_linear}),
        ("head", {"log_probs": engine_log_probs}),
        ("norms", {"norm": engine_norm, "add_norm": engine_add_norm}),
        ("activation", {"gated": engine_kernels.engine_gated}),
        ("rotation", {"rotate": engine_rotate}),
        ("attention", {"attend": flash}),
        ("its pages", {"attend": engine_attend}),
    ]
    rungs = [("roll's forward, not compiled", PLAIN)]
    for name, exchanged in steps:
        rungs.append((f"+ {name} of vLLM", replace(rungs[-1][1], **exchanged)))
    return rungs


def engine_log_probs(hidden: Tensor, targets: Tensor, head: Any) -> Tensor:
    """Return the log-probs as an engine computes them."""
    return engine_kernels.engine_log_probs(hidden, head.weight, targets, 1.0)


def engine_norm(hidden: Tensor, norm: Any) -> Tensor:
    """Return the norm without a sum, as in an engine's first layer."""
    return engine_kernels.engine_norm(hidden, norm.weight, norm.variance_epsilon)


def engine_add_norm(hidden: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum, and the sum."""
    return engine_kernels.engine_add_norm(hidden, residual, norm.weight, norm.variance_epsilon)


def engine_rotate(query: Tensor, key: Tensor, inputs: PackedInputs, rotary: Any) -> tuple[Tensor, Tensor]:
    """Rotate with vLLM's kernel and cosines."""
    base = rotary.config.rope_parameters["rope_theta"]
    return engine_kernels.engine_rotate(query, key, inputs.position_ids, inputs.max_length, base)


def engine_attend(query: Tensor, key: Tensor, value: Tensor, inputs: PackedInputs, scale: float) -> Tensor:
    """Attend with vLLM's FlashAttention, over keys and values in pages, as in a KV cache."""
    return engine_kernels.engine_attend(query, key, value, inputs.cu_seq_lens, inputs.max_length, scale)


def flash(query: Tensor, key: Tensor, value: Tensor, inputs: PackedInputs, scale: float) -> Tensor:
    """Attend with vLLM's FlashAttention, over keys and values that lie side by side."""
    vllm = import_module("vllm.v1.attention.backends.fa_utils")
    given = {"max_seqlen_q": inputs.max_length, "max_seqlen_k": inputs.max_length, "softmax_scale": scale}
    given |= {"cu_seqlens_q": inputs.cu_seq_lens, "cu_seqlens_k": inputs.cu_seq_lens, "causal": True, "num_splits": 1}
    parts = query, key.contiguous(), value.contiguous()
    return vllm.flash_attn_varlen_func(*parts, fa_version=vllm.get_flash_attn_version(), **given)
