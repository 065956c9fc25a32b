"""Log-probs and entropy from hidden states, without a tensor of shape [tokens, vocabulary].

Logits are computed in chunks of a fixed number of logits, reduced to a few numbers per token, and freed. The backward
pass recomputes them, except for the last chunk, which is kept and processed first. So memory grows neither with the
micro-batch nor with the vocabulary. Logits are accumulated and reduced in fp32 even if weights are bf16, because this
precision determines how closely the trainer's log-probs match the engine's. On CUDA, the passes over the logits are
compiled: the forward pass reads them twice, and the backward pass reads them once and writes bf16 once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from roll.config.plan.memory import head_tokens


class LogProbHead(nn.Module):
    """Replaces a causal model's `lm_head` and shares its weight.

    Because it is a module, calling it triggers ZeRO-3's hooks, which gather the sharded weight during the forward pass
    and again during the backward pass.
    """

    def __init__(self, lm_head: nn.Linear) -> None:
        super().__init__()
        if lm_head.bias is not None:
            raise ValueError("models whose lm_head has a bias are not supported")
        self.weight = lm_head.weight
        self.in_features, self.out_features = lm_head.in_features, lm_head.out_features

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        more: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Any:
        """Return log-probs and entropies of the targets, or logits without targets.

        Args:
            hidden: [T, H], or [..., H] without targets.
            targets: [T], token ids whose log-probs to return.
            temperature: Divisor of the logits.
            more: Another function of the hidden states and the weight, called while the weight is gathered.

        Returns:
            With targets: log-probs fp32 [T] (natural log) and entropies fp32 [T] (nats), followed by the result of
                `more` if given.
            Without targets: the result of `more` if given, otherwise logits [..., V] as `nn.Linear` returns them.
        """
        if targets is None:
            return nn.functional.linear(hidden, self.weight) if more is None else more(hidden, self.weight)
        found = chunked_log_probs(hidden, self.weight, targets, temperature)
        return found if more is None else (*found, more(hidden, self.weight))


def chunked_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log softmax(hidden @ weight.T / temperature) at the targets, and the entropy of the softmax. Both are
    differentiable.

    Args:
        hidden: [T, H].
        weight: [V, H].
        targets: [T] integer.

    Returns:
        fp32 [T] log-probs and fp32 [T] entropies, natural log.
    """
    return _ChunkedLogProbs.apply(hidden, weight, targets, temperature)


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return hidden @ weight.T in fp32, accumulated in fp32."""
    if weight.dtype == torch.float32:
        return hidden @ weight.t()
    if weight.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden.float() @ weight.float().t()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to the fp32 tensor `total` in place. Products of any dtype are accumulated in fp32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


def token_statistics(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target's log-prob, log partition and entropy, fp32 [T] each, for logits fp32 [T, V] times `scale`."""
    scaled = logits * scale
    largest = scaled.amax(dim=-1, keepdim=True)
    shifted = scaled - largest
    exponentials = shifted.exp()
    total = exponentials.sum(dim=-1)
    log_total = total.log()
    log_z = log_total + largest[:, 0]
    log_probs = logits.gather(1, targets[:, None])[:, 0] * scale - log_z
    return log_probs, log_z, log_total - (exponentials * shifted).sum(dim=-1) / total


def logit_gradient(
    logits: Tensor,
    targets: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the loss with respect to the logits, [T, V] in `dtype`.

    For z = `scale` * logits: d log p_y / dz = onehot(y) - p and d entropy / dz = -p (log p + entropy).
    """
    log_p = logits * scale - log_z[:, None]
    slope = -grad_log_probs[:, None]
    if grad_entropy is not None:
        slope = slope - grad_entropy[:, None] * (log_p + entropy[:, None])
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return ((log_p.exp() * slope + torch.where(is_target, grad_log_probs[:, None], 0.0)) * scale).to(dtype)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function wrapped in torch.compile. Each function is wrapped only once."""
    return torch.compile(function)


def _fused(function: Callable[..., Any], logits: Tensor, *rest: Any) -> Any:
    """Call a pure function on a chunk. On CUDA it is compiled for this vocabulary size and any number of tokens."""
    if not logits.is_cuda:
        return function(logits, *rest)
    for tensor in (logits, *rest):
        if isinstance(tensor, Tensor):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return compiled(function)(logits, *rest)


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    """Return the chunks. An incomplete one comes first, so that the last, whose logits are kept, is full."""
    size = head_tokens(vocabulary)
    return [slice(max(0, end - size), end) for end in range(tokens % size or size, tokens + 1, size)]


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_probs)
        log_z = torch.empty_like(log_probs)
        logits = None
        for part in _chunks(len(hidden), len(weight)):
            logits = None  # free them before the next chunk's logits are computed
            logits = logits_of(hidden[part], weight)
            log_probs[part], log_z[part], entropy[part] = _fused(
                token_statistics, logits, targets[part], 1 / temperature
            )
        ctx.last_logits = logits if any(ctx.needs_input_grad) else None
        # Keep a reference to the weight instead of saving it, because ZeRO-3 gathers its storage again for the backward
        # pass.
        ctx.weight = weight
        ctx.temperature = temperature
        ctx.save_for_backward(hidden, targets, log_z, entropy)
        # If no loss uses the entropy, its gradient is None instead of zeros, which saves computation.
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, targets, log_z, entropy = ctx.saved_tensors
        weight: Tensor = ctx.weight
        slopes = torch.zeros_like(log_z) if grad_log_probs is None else grad_log_probs
        grad_hidden = torch.empty_like(hidden)
        grad_weight = (
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if ctx.needs_input_grad[1] else None
        )
        logits, ctx.last_logits = ctx.last_logits, None
        for part in reversed(_chunks(len(hidden), len(weight))):
            slopes_of_entropy = None if grad_entropy is None else grad_entropy[part]
            given = (
                targets[part],
                log_z[part],
                entropy[part],
                slopes[part],
                slopes_of_entropy,
                1 / ctx.temperature,
                weight.dtype,
            )
            grad_logits = _fused(logit_gradient, logits_of(hidden[part], weight) if logits is None else logits, *given)
            logits = None
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                add_product(grad_weight, grad_logits.t(), hidden[part])
            del grad_logits  # free it before the next chunk's logits are computed
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None
