"""Divergences between two policies, computed over two outcomes: the sampled token, and any other token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def binary_divergence(log_probs: Tensor, old_log_probs: Tensor, kind: Literal["tv", "kl"]) -> Tensor:
    """Return the binary divergence [S] of the sampled tokens' probabilities p and q: `tv` is |p - q|, `kl` is KL(q || p) in nats.

    It is a lower bound of the divergence of the whole distributions. If p or q rounds to 1, its complement is replaced by the smallest
    positive normal number of the dtype.

    Source: Qi et al., arXiv 2602.04879.

    Args:
        log_probs: [S], log p.
        old_log_probs: [S], log q.
    """
    log_p, log_q = log_probs.clamp(max=0.0), old_log_probs.clamp(max=0.0)
    q = log_q.exp()
    if kind == "tv":
        return (log_p.exp() - q).abs()
    return q * (log_q - log_p) - torch.expm1(log_q) * (_log_rest(log_q) - _log_rest(log_p))


def _log_rest(log_p: Tensor) -> Tensor:
    """Return log(1 - p)."""
    return (-torch.expm1(log_p)).clamp(min=torch.finfo(log_p.dtype).tiny).log()
