"""A forward pass whose every operation is computed by the kernel of a batch-invariant engine of vLLM.

Log-probs then equal those of an engine that runs these kernels as they are, to the last bit. vLLM's kernels have no
gradients: each operation is also computed by torch, whose gradient is used. The two results differ by rounding only.

A batch-invariant engine multiplies matrices with cuBLAS on Hopper, without splitting sums. vLLM's own matrix product,
which is used here, adds in the same order, as `benchmarks/bitwise.py` shows. Kernels are those of vLLM 0.32.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from roll.config.derived.model_shape import has_known_operations
from roll.errors import ConfigError, Fault
from roll.models.attention import packed_attention
from roll.models.layers import decoder_layers
from roll.models.logits import FinalLogits
from roll.models.packed import LogProbHead

PAGE = 16
"""Tokens of a block of an engine's KV cache."""
HEAD_ROWS = 2048
"""States whose logits are computed at the same time."""


@dataclass(frozen=True)
class Kernels:
    """The operations of a forward pass. T tokens, H is the model's width, D that of a head."""

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """Input [..., I], weight [O, I] and bias [O] or None -> [..., O]."""
    norm: Callable[[Tensor, Tensor, float], Tensor]
    """States [..., H], weight [H] and epsilon -> [..., H]."""
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """States [..., H], residual [..., H], weight [H] and epsilon -> the normalised sum, and the sum."""
    gated: Callable[[Tensor], Tensor]
    """Gate and up-projection side by side, [..., 2 I] -> silu(gate) * up, [..., I]."""
    rotate: Callable[[Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor]]
    """Queries [T, heads, D], keys [T, key-value heads, D], positions [T], the number of positions and the base of the
    rotary embedding -> both, rotated.
    """
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]
    """Queries [T, heads, D], keys and values [T, key-value heads, D], offsets int32 [N + 1], the longest sequence and
    the scale -> [T, heads, D].
    """
    log_probs: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """States [S, H], weight [V, H], targets [S] and temperature -> fp32 [S]."""


def engine_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply with sums in an order that does not depend on the number of rows."""
    return _invariant().linear_batch_invariant(hidden, weight, bias)


def engine_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the norm without a sum, as in an engine's first layer, and of queries and keys."""
    return _invariant().rms_norm_batch_invariant(hidden, weight, epsilon)


def engine_add_norm(hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum, and the sum. vLLM's kernel writes both in the place of its arguments."""
    ops = import_module("vllm._custom_ops")
    normed, total = hidden.clone(), residual.clone()
    ops.fused_add_rms_norm(normed, total, weight, epsilon)
    return normed, total


def engine_gated(both: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    import_module("vllm._custom_ops")  # loads torch.ops._C
    out = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
    torch.ops._C.silu_and_mul(out, both)
    return out


def engine_rotate(query: Tensor, key: Tensor, positions: Tensor, longest: int, base: float) -> tuple[Tensor, Tensor]:
    """Rotate with vLLM's kernel, and with cosines computed as vLLM does: on the device, in fp32, then rounded."""
    ops = import_module("vllm._custom_ops")
    width = query.shape[-1]
    with torch.device(query.device):
        frequencies = 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float) / width))
        angles = torch.einsum("i,j -> ij", torch.arange(longest, dtype=torch.float), frequencies)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(query.dtype)
    turned, other = query.flatten(1).clone(), key.flatten(1).clone()
    ops.rotary_embedding(positions, turned, other, width, table, True)
    return turned.view(query.shape), other.view(key.shape)


def engine_attend(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float) -> Tensor:
    """Attend with vLLM's FlashAttention without splits of the keys, over keys and values in pages, as in a KV cache."""
    vllm = import_module("vllm.v1.attention.backends.fa_utils")
    lengths = offsets.diff()
    pages, count = -(-longest // PAGE), len(lengths)
    table = torch.arange(count * pages, dtype=torch.int32, device=query.device).view(count, pages)
    rows = torch.repeat_interleave(torch.arange(count, device=query.device), lengths.long())
    places = torch.arange(len(query), device=query.device) - offsets[:-1][rows] + rows * pages * PAGE
    keys, values = (
        part.new_zeros(count * pages * PAGE, *part.shape[1:])
        .index_copy(0, places, part)
        .view(-1, PAGE, *part.shape[1:])
        for part in (key, value)
    )
    return vllm.flash_attn_varlen_func(
        query,
        keys,
        values,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        cu_seqlens_q=offsets,
        seqused_k=lengths,
        block_table=table,
        softmax_scale=scale,
        causal=True,
        num_splits=1,
        fa_version=vllm.get_flash_attn_version(),
    )


def engine_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return the log-probs as an engine computes them: from logits in the model's dtype."""
    of_logits = import_module("vllm.v1.worker.gpu.sample.logprob").compute_token_logprobs
    found = [torch.empty(0, device=hidden.device)]
    for rows, ids in zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
        logits = engine_linear(rows, weight, None)
        found.append(of_logits(logits if temperature == 1 else logits.float() / temperature, ids[:, None])[:, 0])
    return torch.cat(found)


def _invariant() -> Any:
    return import_module("vllm.model_executor.determinism.batch_invariant")


ENGINE = Kernels(
    linear=engine_linear,
    norm=engine_norm,
    add_norm=engine_add_norm,
    gated=engine_gated,
    rotate=engine_rotate,
    attend=engine_attend,
    log_probs=engine_log_probs,
)
"""The kernels of a batch-invariant engine. They need a GPU."""


class _Valued(torch.autograd.Function):
    """Returns other values for a tensor, and gives it the gradient."""

    @staticmethod
    def forward(ctx: Any, plain: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def exchanged(plain: Callable[..., Tensor], kernel: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return the result of `kernel`, with the gradient of `plain` at the same inputs."""
    with torch.no_grad():
        values = kernel(*inputs)
    return _Valued.apply(plain(*inputs), values) if torch.is_grad_enabled() else values


def use_engine_kernels(model: PreTrainedModel, kernels: Kernels = ENGINE) -> None:
    """Exchange the operations of a loaded model, except for its head; see `EngineHead`.

    Raises:
        ConfigError: the model has operations that are not known here, or there is no GPU.
    """
    config = model.config
    if not has_known_operations(config.to_dict()):
        problem = f"true, but the operations of this model of type {config.model_type} are not known"
        raise ConfigError(Fault("model_args.engine_kernels", problem, "remove the key", "not_supported"))
    if kernels is ENGINE:
        if not torch.cuda.is_available():
            problem = "true, but there is no GPU, which vLLM's kernels need"
            raise ConfigError(Fault("model_args.engine_kernels", problem, "remove the key", "not_supported"))
        # Its compiled code reads the variable at the first call: its norms then have no variant by alignment.
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            vars(module)["forward"] = partial(linear, kernels, module)
        elif hasattr(module, "variance_epsilon"):
            is_alone = name.endswith((".layers.0.input_layernorm", ".q_norm", ".k_norm"))
            vars(module)["forward"] = partial(norm, kernels.norm if is_alone else partial(sum_norm, kernels), module)
    for layer in decoder_layers(model):
        mixer, block = cast(Any, layer.self_attn), cast(Any, layer.mlp)
        mixer.forward = partial(attention, kernels, mixer, config.rope_parameters["rope_theta"])
        block.forward = partial(mlp, kernels, block)


def linear(kernels: Kernels, module: Any, hidden: Tensor) -> Tensor:
    """Compute `nn.Linear.forward`."""
    return exchanged(nn.functional.linear, kernels.linear, hidden, module.weight, module.bias)


def norm(kernel: Callable[[Tensor, Tensor, float], Tensor], module: Any, hidden: Tensor) -> Tensor:
    """Compute the forward method of an RMSNorm of transformers."""

    def plain(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return type(module).forward(module, states)

    return exchanged(plain, kernel, hidden, module.weight, module.variance_epsilon)


def sum_norm(kernels: Kernels, total: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the norm of a sum that is known already, with the kernel that adds: to zero."""
    return kernels.add_norm(total, torch.zeros_like(total), weight, epsilon)[0]


def mlp(kernels: Kernels, module: Any, hidden: Tensor) -> Tensor:
    """Compute the forward method of a gated MLP."""
    both = torch.cat([module.gate_proj(hidden), module.up_proj(hidden)], dim=-1)
    return module.down_proj(exchanged(plain_gated, kernels.gated, both))


def plain_gated(both: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., I], from both side by side."""
    gate, up = both.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def attention(
    kernels: Kernels,
    module: Any,
    base: float,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    position_ids: Tensor,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the forward method of a layer's attention over packed sequences, [1, T, H]. `base`: see `Kernels`."""
    tokens, width = hidden_states.shape[1], module.head_dim
    query, key, value = (part(hidden_states) for part in (module.q_proj, module.k_proj, module.v_proj))
    query, key, value = (part.view(tokens, -1, width) for part in (query, key, value))
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    heads = query.shape[1]

    def rotated(both: Tensor) -> Tensor:
        turned = kernels.rotate(both[:, :heads], both[:, heads:], position_ids[0], max_length_q, base)
        return torch.cat(turned, dim=1)

    def plainly_rotated(both: Tensor) -> Tensor:
        cos, sin = position_embeddings
        return apply_rotary_pos_emb(both[None], both[None], cos, sin, unsqueeze_dim=2)[0][0]

    def plainly_attended(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
        given = {"cu_seq_lens_q": cu_seq_lens_q, "max_length_q": max_length_q, "scaling": module.scaling}
        return packed_attention(module, query, key, value, None, **given)[0][0]

    both = exchanged(plainly_rotated, rotated, torch.cat([query, key], dim=1))
    parts = both[:, :heads].contiguous(), both[:, heads:].contiguous(), value.contiguous()
    out = exchanged(plainly_attended, kernels.attend, *parts, cu_seq_lens_q, max_length_q, module.scaling)
    return module.o_proj(out.reshape(1, tokens, -1)), None


class EngineHead(LogProbHead):
    """A `LogProbHead` whose log-probs are an engine's. Entropies and all gradients are those of a `LogProbHead`."""

    def __init__(self, lm_head: nn.Linear, final: FinalLogits, kernels: Kernels = ENGINE) -> None:
        """See `LogProbHead`."""
        super().__init__(lm_head, final)
        self._kernels = kernels

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        more: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Any:
        """See `LogProbHead`."""
        found = super().forward(hidden, targets, temperature, more)
        if targets is None:
            return found
        with torch.no_grad():
            values = self._kernels.log_probs(hidden, self.weight, targets, temperature)
        return (_Valued.apply(found[0], values), *found[1:])
