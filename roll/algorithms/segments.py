"""Sums and means over the sequences of a micro-batch. A sequence is never split over micro-batches, so these are exact."""

from __future__ import annotations

import torch
from torch import Tensor


def sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum over each sequence's tokens, fp64 [N]. Arguments as of `sequence_sum`."""
    return torch.segment_reduce(values.double(), "sum", lengths=lengths, unsafe=True)


def sequence_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum over each sequence's tokens, at every one of them. Computed in fp64: in fp32 32,768 tokens are off by tenths.

    Args:
        values: [S], tokens of N sequences laid end to end.
        lengths: int64 [N], tokens of each; they sum to S. A sequence may have none.
    """
    return torch.repeat_interleave(sums(values, lengths).to(values.dtype), lengths, output_size=len(values))


def sequence_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean over each sequence's tokens, at every one of them. Arguments as of `sequence_sum`."""
    counts = torch.repeat_interleave(lengths, lengths, output_size=len(values))
    return sequence_sum(values, lengths) / counts
