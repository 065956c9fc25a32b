"""Log-probs and entropy straight from hidden states, without a tokens-by-vocabulary tensor.

The head's product is formed for `CHUNK_TOKENS` tokens at a time, reduced to two numbers a token, and dropped; the
backward pass forms it again. Memory is O(chunk x vocabulary) whatever the micro-batch. Logits are accumulated and
reduced in fp32 even where weights are bf16: the difference between trainer and engine is made here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHUNK_TOKENS = 1024


class LogProbHead(nn.Module):
    """Takes the place of a causal model's `lm_head` and shares its weight.

    Being a module, its call triggers ZeRO-3's hooks, so that the sharded weight is whole while it is used, in the
    forward pass and again in the backward pass.
    """

    def __init__(self, lm_head: nn.Linear) -> None:
        super().__init__()
        if lm_head.bias is not None:
            raise ValueError("models whose lm_head has a bias are not supported")
        self.weight = lm_head.weight
        self.in_features, self.out_features = lm_head.in_features, lm_head.out_features

    def forward(self, hidden: Tensor, targets: Tensor | None = None, temperature: float = 1.0) -> Any:
        """Logits [..., V] of hidden [..., H], as `nn.Linear` would; with targets the pair (log_probs, entropy).

        Args:
            hidden: [T, H] when targets are given.
            targets: [T] token ids whose log-probs are wanted.
            temperature: logits are divided by it.

        Returns:
            fp32 [T] natural-log probability of each target, fp32 [T] entropy in nats.
        """
        if targets is None:
            return nn.functional.linear(hidden, self.weight)
        return chunked_log_probs(hidden, self.weight, targets, temperature)


def chunked_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at the targets, and its entropy. Both differentiable.

    Args:
        hidden: [T, H].
        weight: [V, H].
        targets: [T] integer.

    Returns:
        fp32 [T] log-probs and fp32 [T] entropies, natural log.
    """
    return _ChunkedLogProbs.apply(hidden, weight, targets, temperature)  # pyright: ignore[reportReturnType]


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    if weight.dtype == torch.float32:
        logits = hidden @ weight.t()
    elif weight.is_cuda:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = hidden.float() @ weight.float().t()
    return logits if temperature == 1.0 else logits.div_(temperature)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        log_probs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_probs)
        log_z = torch.empty_like(log_probs)
        for start in range(0, count, CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            logits = _logits(hidden[part], weight, temperature)
            log_z[part] = torch.logsumexp(logits, dim=-1)
            log_probs[part] = logits.gather(1, targets[part, None])[:, 0] - log_z[part]
            logits.sub_(log_z[part, None])
            entropy[part] = -(logits.exp() * logits).sum(dim=-1)
        # The weight is kept by reference, not saved: under ZeRO-3 its storage is gathered anew for the backward pass.
        ctx.weight = weight
        ctx.temperature = temperature
        ctx.save_for_backward(hidden, targets, log_z, entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        grad_log_probs, grad_entropy = gradients
        hidden, targets, log_z, entropy = ctx.saved_tensors
        weight: Tensor = ctx.weight
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden.shape[0], CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            log_p = _logits(hidden[part], weight, ctx.temperature).sub_(log_z[part, None])
            p = log_p.exp()
            # d log p_y / d logits = onehot(y) - p;  d H / d logits = -p (log p + H)
            grad_logits = p * (-grad_log_probs[part, None] - grad_entropy[part, None] * (log_p + entropy[part, None]))
            grad_logits.scatter_add_(1, targets[part, None], grad_log_probs[part, None])
            grad_logits = grad_logits.div_(ctx.temperature)
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.t(), hidden[part].float())
            grad_hidden[part] = grad_logits.to(weight.dtype) @ weight
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None
