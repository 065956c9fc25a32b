"""Divergences of two policies over two outcomes: the sampled token, and any other."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def binary_divergence(log_probs: Tensor, old_log_probs: Tensor, kind: Literal["tv", "kl"]) -> Tensor:
    """Return the binary divergence [S] of probabilities p and q of the sampled tokens: `tv` is |p - q|, `kl` is KL(q || p) in nats.

    Never above the divergence of the whole distributions. Where p is 1 in the arithmetic of the tensors, 1 - p is taken for their smallest
    positive number.

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
    """log(1 - p)."""
    return (-torch.expm1(log_p)).clamp(min=torch.finfo(log_p.dtype).tiny).log()
