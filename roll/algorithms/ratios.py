"""Probability ratios, clamped so that they stay finite.

Sums and means over the tokens of each sequence. They are exact, because a sequence is never split over
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


LARGEST_LOG_RATIO = 20.0
"""Largest log-ratio. Ratios are at most e^20 = 5e8, as in verl. In fp32, e^89 is infinite, and 0 times infinity is NaN.
"""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), clamped to at most e^20. Clamped values have no gradient."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def is_clamped(log_ratio: Tensor) -> Tensor:
    """Mark the log-ratios that `ratio_of` clamps."""
    return log_ratio.detach() > LARGEST_LOG_RATIO
