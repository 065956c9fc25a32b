"""Divergences between two policies, computed over two outcomes: the sampled token, and any other token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def binary_divergence(log_probs: Tensor, old_log_probs: Tensor, kind: Literal["tv", "kl"]) -> Tensor:
    """Return the binary divergence [S] of the sampled tokens' probabilities p and q: `tv` is |p - q|, `kl` is KL(q || p) in nats.

    It is a lower bound of the divergence of the whole distributions. If log p or log q rounds to 0, its complement is below the precision
    of a probability near 1, half the machine epsilon, and this precision takes its place.

    Source: Qi et al., arXiv 2602.04879.

    Args:
        log_probs: [S], log p.
        old_log_probs: [S], log q.
    """
    log_p, log_q = log_probs.clamp(max=0.0), old_log_probs.clamp(max=0.0)
    q = log_q.exp()
    if kind == "tv":
        return (log_p.exp() - q).abs()
    return (q * (log_q - log_p) - torch.expm1(log_q) * (_log_rest(log_q) - _log_rest(log_p))).clamp(min=0.0)


def _log_rest(log_p: Tensor) -> Tensor:
    """Return log(1 - p), exact for any log p below 0."""
    rest = -torch.expm1(log_p)
    return torch.where(rest > 0, rest, torch.finfo(log_p.dtype).eps / 2).log()
