"""Sums and means over the tokens of each sequence. They are exact, because a sequence is never split over
micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum over each sequence's tokens, fp64 [N]. See `sequence_sum` for the arguments."""
    return torch.segment_reduce(values.double(), "sum", lengths=lengths, unsafe=True)


def sequence_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Return [S]: for each token, the sum over its sequence. Computed in fp64, because a sum of 32,768 tokens in fp32
    is off by tenths.

    Args:
        values: [S], values of the tokens of N concatenated sequences.
        lengths: int64 [N], number of tokens of each sequence, possibly 0. They sum to S.
    """
    return torch.repeat_interleave(sums(values, lengths).to(values.dtype), lengths, output_size=len(values))


def sequence_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """Return [S]: for each token, the mean over its sequence. See `sequence_sum` for the arguments."""
    counts = torch.repeat_interleave(lengths, lengths, output_size=len(values))
    return sequence_sum(values, lengths) / counts
