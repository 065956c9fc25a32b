"""Divergences between the next-token distributions of student and teacher, and distillation losses. Pure tensor
functions.

P is the teacher's distribution over the vocabulary and Q the student's. Both are softmax(logits / temperature).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roll.algorithms.losses import Loss, LossInputs, TokenLosses
from roll.algorithms.objectives import PolicyLoss
from roll.types import Bools, TrainBatch


@dataclass(frozen=True)
class Divergence:
    """The divergence between P and Q at each token.

    `forward_kl` is KL(P || Q) = sum P (log P - log Q) (Hinton et al., arXiv 1503.02531, without its factor of
    temperature squared); `reverse_kl` is KL(Q || P) (MiniLLM, arXiv 2306.08543, eq. 1); `jsd` is beta KL(P || M) + (1 -
    beta) KL(Q || M) with M = beta P + (1 - beta) Q (generalised Jensen-Shannon, GKD, arXiv 2306.13649, eq. 1).
    """

    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    beta: float = 0.5
    """Weight of the teacher in the mixture of `jsd`, between 0 and 1."""
    temperature: float = 1.0

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergences [K], in nats, for logits [K, V]."""
        return self.between((student / self.temperature).log_softmax(-1), (teacher / self.temperature).log_softmax(-1))

    def between(self, q: Tensor, p: Tensor) -> Tensor:
        """Return the divergences [K], in nats, for log-probs [K, C] of the student (q) and the teacher (p)."""
        if self.kind == "forward_kl":
            return _kl(p, q)
        if self.kind == "reverse_kl":
            return _kl(q, p)
        mixture = torch.logaddexp(p + math.log(self.beta), q + math.log(1 - self.beta))
        return self.beta * _kl(p, mixture) + (1 - self.beta) * _kl(q, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(P || Q) from the log-probs p and q."""
    return (p.exp() * (p - q)).sum(-1)


@dataclass(frozen=True)
class Distillation(Loss):
    """weight * divergence - (1 - weight) * log pi: learn from the teacher's distribution and the tokens."""

    weight: float = 1.0

    def __call__(self, log_probs: Tensor, entropy: Tensor, divergence: Tensor, inputs: LossInputs) -> TokenLosses:
        """See `Loss`. A student model also returns the divergence [S]."""
        losses = self.weight * divergence - (1 - self.weight) * log_probs
        metrics = {
            "distill/loss": losses,
            "distill/divergence": divergence,
            "distill/nll": -log_probs,
            "distill/entropy": entropy,
        }
        return TokenLosses(losses, {name: values.detach() for name, values in metrics.items()})


@dataclass(frozen=True)
class DistilledPolicy(Loss):
    """The RL loss + coef * divergence from a teacher, on responses sampled by the policy itself.

    No gradient passes through the sampling. Source: generalised knowledge distillation (GKD), arXiv 2306.13649, in its
    on-policy form combined with reinforcement learning.
    """

    policy: PolicyLoss
    coef: float = 1.0

    def token_selection(self, batch: TrainBatch) -> Bools | None:
        return self.policy.token_selection(batch)

    def __call__(self, log_probs: Tensor, entropy: Tensor, divergence: Tensor, inputs: LossInputs) -> TokenLosses:
        """See `Loss`. A student model also returns the divergence [S]."""
        result = self.policy(log_probs, entropy, inputs)
        metrics = {**result.metrics, "distill/divergence": divergence.detach()}
        return TokenLosses(result.losses + self.coef * divergence, metrics, result.counted)
