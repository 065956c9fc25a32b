"""Divergence from a teacher over the whole vocabulary, computed from hidden states as `head.py` computes log-probs.

The logits of student and teacher are computed for a fixed number of tokens at a time, compared, and freed. The backward
pass recomputes them. A teacher's output is sent and stored as hidden states [S, H] or as its top k tokens, never as
logits [S, V].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from roll.algorithms.divergence import Divergence
from roll.config.plan.memory import head_tokens
from roll.models.head import add_product, logits_of
from roll.models.teacher_top import TeacherTop, in_buckets

Compare = Callable[[Tensor, Tensor], Tensor]
"""Function from the student's fp32 logits [K, R] and the teacher's output for the same tokens [K, ...] to divergences
[K], in nats.
"""
TENSORS = 8
"""Number of logit-sized tensors that a comparison keeps in memory. Log-probs need two."""


def chunked_divergence(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, measure: Divergence
) -> Tensor:
    """Return the divergences [S], in nats, between hidden @ weight.T and the teacher's logits. Differentiable in hidden
    and weight.

    If one output matrix has more rows, because it is padded to a round number, both distributions are restricted to the
    rows that both matrices have.

    Args:
        hidden: [S, H].
        weight: [V, H].
        teacher_hidden: [S, H'].
        teacher_weight: [V', H'].
    """
    rows = min(len(weight), len(teacher_weight))

    def compare(student: Tensor, states: Tensor) -> Tensor:
        return measure(student, logits_of(states, teacher_weight[:rows]))

    return _ChunkedDivergence.apply(hidden, weight, teacher_hidden, compare, rows)


def chunked_top_divergence(
    hidden: Tensor, weight: Tensor, encoded: Tensor, top: TeacherTop, measure: Divergence
) -> Tensor:
    """Return the divergences [S], in nats, over k + 1 categories: the teacher's top k tokens, and all other tokens
    together.

    Differentiable in hidden and weight.

    Args:
        hidden: [S, H].
        weight: [V, H].
        encoded: fp32 [S, top.width], see `TeacherTop.encode`.
    """

    def compare(student: Tensor, part: Tensor) -> Tensor:
        p, token_ids = top.decode(part)
        return measure.between(in_buckets((student / top.temperature).log_softmax(-1), token_ids), p)

    return _ChunkedDivergence.apply(hidden, weight, encoded, compare, top.rows)


class _ChunkedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, teacher: Tensor, compare: Compare, rows: int) -> Tensor:
        out = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for part in chunks(len(hidden), len(weight)):
            out[part] = compare(logits_of(hidden[part], weight[:rows]), teacher[part])
        # Keep a reference to the weight instead of saving it, because ZeRO-3 gathers its storage again for the backward
        # pass.
        ctx.weight, ctx.compare, ctx.rows = weight, compare, rows
        ctx.save_for_backward(hidden, teacher)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, teacher = ctx.saved_tensors
        weight: Tensor = ctx.weight
        rows: int = ctx.rows
        grad_hidden = torch.empty_like(hidden)
        grad_weight = (
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if ctx.needs_input_grad[1] else None
        )
        for part in chunks(len(hidden), len(weight)):
            student = logits_of(hidden[part], weight[:rows])
            with torch.enable_grad():
                student.requires_grad_()
                (slope,) = torch.autograd.grad(ctx.compare(student, teacher[part]), student, grad[part])
            slope = slope.to(weight.dtype)
            torch.mm(slope, weight[:rows], out=grad_hidden[part])
            if grad_weight is not None:
                add_product(grad_weight[:rows], slope.t(), hidden[part])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def chunks(tokens: int, vocabulary: int) -> list[slice]:
    """Split the tokens into slices. The logits of one slice are computed and compared at a time."""
    size = max(16, head_tokens(vocabulary) * 2 // TENSORS)
    return [slice(start, start + size) for start in range(0, tokens, size)]
