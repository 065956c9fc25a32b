"""A teacher's k most probable tokens, and all others as one, which it may send instead of hidden states.

Both distributions are summed into k + 1 categories, so their divergence is never above the whole one (data processing), grows with k, and
is the whole one where k is the vocabulary. Of KL(P, Q) the tail's mass P(tail) times KL(P, Q given the tail) is missing, of KL(Q, P)
Q(tail) times KL(Q, P given the tail). Renormalising over the top k, or leaving the tail out, does not see how much the student gives to the
tail. Source: SDPO, arXiv 2601.20802, and TA-OPD, arXiv 2608.14728.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EXACT = 1 << 24
"""fp32 holds whole numbers up to this, token ids among them."""


@dataclass(frozen=True)
class TeacherTop:
    """Selects and encodes the log-probs that a teacher sends."""

    count: int
    """k, at most `rows`."""
    rows: int
    """Rows that both output matrices have: the tokens over which both distributions are taken."""
    temperature: float
    """Logits are divided by it."""

    def __post_init__(self) -> None:
        assert 0 < self.count <= self.rows <= EXACT, f"top {self.count} of {self.rows}"

    @property
    def width(self) -> int:
        """Return the number of fp32 values per token."""
        return 2 * self.count + (self.count < self.rows)

    def encode(self, logits: Tensor) -> Tensor:
        """Encode logits [K, rows] as fp32 [K, width]: descending log-probs of the top k, that of all others as one (if any), and ids."""
        log_probs = (logits / self.temperature).log_softmax(-1)
        token_ids = log_probs.topk(self.count).indices
        return torch.cat([in_buckets(log_probs, token_ids).float(), token_ids.float()], -1)

    def decode(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probs [K, k + 1], or [K, k] if k is `rows`, and int64 ids [K, k]."""
        return encoded[:, : -self.count], encoded[:, -self.count :].long()


def in_buckets(log_probs: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probs [K, k + 1] of the given tokens [K, k] and of all others of log-probs [K, V] as one; [K, k] where there are no others.

    The others are added up, not taken from 1: that is exact for a tail of any size.
    """
    chosen = log_probs.gather(-1, token_ids)
    if token_ids.shape[-1] == log_probs.shape[-1]:
        return chosen
    others = log_probs.scatter(-1, token_ids, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([chosen, others], -1)
