"""Divergence from a teacher over the whole vocabulary, straight from hidden states, as `head.py` has log-probs.

Logits of student and teacher are formed for a fixed number of tokens at a time, compared, and dropped; the backward pass forms them
again. Between processes and in memory a teacher is its hidden states [S, H], not its logits [S, V].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from roll.algorithms.divergence import Divergence
from roll.config.plan.memory import head_tokens
from roll.models.head import add_product, logits_of

TENSORS = 8
"""Tensors of the size of the logits that comparing takes, where log-probs take two."""


def chunked_divergence(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, measure: Divergence) -> Tensor:
    """Nats [S] of `measure` between hidden @ weight.T and the teacher's logits. Differentiable in hidden and weight.

    Where one output matrix has more rows than the other, filled up to a round number, both distributions are those over the rows
    that both have.

    Args:
        hidden: [S, H].
        weight: [V, H].
        teacher_hidden: [S, H'].
        teacher_weight: [V', H'].
    """
    return _ChunkedDivergence.apply(hidden, weight, teacher_hidden, teacher_weight, measure)


def _compared(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 logits [K, shared rows] of student and teacher."""
    rows = min(len(weight), len(teacher_weight))
    return logits_of(hidden, weight[:rows]), logits_of(teacher_hidden, teacher_weight[:rows])


class _ChunkedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, measure: Divergence) -> Tensor:
        out = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for part in _chunks(len(hidden), len(weight)):
            out[part] = measure(*_compared(hidden[part], weight, teacher_hidden[part], teacher_weight))
        # The weight is kept by reference, not saved: under ZeRO-3 its storage is gathered anew for the backward pass.
        ctx.weight, ctx.teacher_weight, ctx.measure = weight, teacher_weight, measure
        ctx.save_for_backward(hidden, teacher_hidden)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, teacher_hidden = ctx.saved_tensors
        weight: Tensor = ctx.weight
        rows = min(len(weight), len(ctx.teacher_weight))
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(hidden), len(weight)):
            student, teacher = _compared(hidden[part], weight, teacher_hidden[part], ctx.teacher_weight)
            with torch.enable_grad():
                student.requires_grad_()
                (slope,) = torch.autograd.grad(ctx.measure(student, teacher), student, grad[part])
            slope = slope.to(weight.dtype)
            torch.mm(slope, weight[:rows], out=grad_hidden[part])
            if grad_weight is not None:
                add_product(grad_weight[:rows], slope.t(), hidden[part])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(16, head_tokens(vocabulary) * 2 // TENSORS)
    return [slice(start, start + size) for start in range(0, tokens, size)]
