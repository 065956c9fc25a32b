"""The top-k output of a teacher, which it can send instead of hidden states: its k most probable tokens, and all other
tokens combined.

Both distributions are reduced to k + 1 categories: the top k tokens and the tail. By the data-processing inequality,
the divergence of the reduced distributions is at most the full divergence. It grows with k, and equals the full
divergence if k is the size of the vocabulary. KL(P || Q) loses the term P(tail) KL(P || Q given the tail), and KL(Q ||
P) loses Q(tail) KL(Q || P given the tail). In contrast, renormalising over the top k tokens, or ignoring the tail,
would not penalise the probability that the student assigns to the tail. Source: SDPO, arXiv 2601.20802, and TA-OPD,
arXiv 2608.14728.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EXACT = 1 << 24
"""Largest n such that fp32 represents all integers from 0 to n exactly. Token ids are sent as fp32."""


@dataclass(frozen=True)
class TeacherTop:
    """Selects and encodes the log-probs that a teacher sends."""

    count: int
    """k, at most `rows`."""
    rows: int
    """Number of rows that both output matrices have. The distributions are over these tokens."""
    temperature: float
    """Divisor of the logits."""

    def __post_init__(self) -> None:
        assert 0 < self.count <= self.rows <= EXACT, f"top {self.count} of {self.rows}"

    @property
    def width(self) -> int:
        """Return the number of fp32 values per token."""
        return 2 * self.count + (self.count < self.rows)

    def encode(self, logits: Tensor) -> Tensor:
        """Encode logits [K, rows] as fp32 [K, width].

        A row has the descending log-probs of the top k tokens, the log-prob of all other tokens together (if any), and
        the top k token ids.
        """
        log_probs = (logits / self.temperature).log_softmax(-1)
        token_ids = log_probs.topk(self.count).indices
        return torch.cat([in_buckets(log_probs, token_ids).float(), token_ids.float()], -1)

    def decode(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probs [K, k + 1], or [K, k] if k equals `rows`, and token ids int64 [K, k]."""
        return encoded[:, : -self.count], encoded[:, -self.count :].long()


def in_buckets(log_probs: Tensor, token_ids: Tensor) -> Tensor:
    """Reduce log-probs [K, V] to log-probs [K, k + 1] of the given tokens [K, k] and of all other tokens together.

    If there are no other tokens, the result is [K, k]. The probabilities of the other tokens are summed, because 1
    minus the rest would be inaccurate for a small tail.
    """
    chosen = log_probs.gather(-1, token_ids)
    if token_ids.shape[-1] == log_probs.shape[-1]:
        return chosen
    others = log_probs.scatter(-1, token_ids, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([chosen, others], -1)
