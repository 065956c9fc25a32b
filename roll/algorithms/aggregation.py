"""Computes the weight of each token in the loss, before the batch is split.

The loss of an update is `sum(weight * token loss)` over all its tokens, on all ranks and in all micro-batches.
The weights are normalised by totals over the whole update, so the split into ranks and micro-batches does not change
the result.
"""

from __future__ import annotations

import numpy as np

from roll.types import Floats, Ints, Sequences

MODES = "token-mean, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm"


def loss_weights(
    sequences: Sequences,
    mode: str,
    scale: float = 1.0,
    sequence_weights: Floats | None = None,
    episode_of_sequence: Ints | None = None,
) -> Floats:
    """Return the weight of each token, [T]; 0 outside the response mask.

    - `token-mean`: the mean over all tokens.
    - `seq-mean-token-sum`: the sum over the tokens of a sequence, then the mean over sequences.
    - `seq-mean-token-mean`: the mean over the tokens of a sequence, then the mean over sequences.
    - `seq-mean-token-sum-norm`: as `seq-mean-token-sum`, divided by the constant `scale` (Dr. GRPO, arXiv 2503.20783,
      section 3.2).

    Sequences with an empty mask do not count. All modes treat the sequences of one episode as one sequence.

    Args:
        scale: Divisor of `seq-mean-token-sum-norm`, in tokens.
        sequence_weights: [N], factor of each sequence's loss. The denominators do not change. None: a factor of 1.
        episode_of_sequence: [N], episode of each sequence. None: each sequence is its own episode.

    Raises:
        ValueError: `mode` is unknown.
    """
    of_sequence = (
        np.arange(len(sequences))
        if episode_of_sequence is None
        else np.unique(episode_of_sequence, return_inverse=True)[1]
    )
    tokens = np.bincount(of_sequence, sequences.response_lengths).astype(np.int64)  # by episode; integer sums are exact
    total, rows = int(tokens.sum()), int((tokens > 0).sum())
    match mode:
        case "token-mean":
            divisors = np.full(len(sequences), float(max(total, 1)))
        case "seq-mean-token-sum":
            divisors = np.full(len(sequences), float(max(rows, 1)))
        case "seq-mean-token-mean":
            divisors = np.maximum(tokens[of_sequence] * max(rows, 1), 1).astype(np.float64)
        case "seq-mean-token-sum-norm":
            divisors = np.full(len(sequences), max(rows, 1) * scale)
        case _:
            raise ValueError(f"no loss_agg_mode is named '{mode}'; known: {MODES}")
    weights = 1.0 / divisors  # the same for all tokens of a sequence
    if sequence_weights is not None:
        weights = weights * sequence_weights.astype(np.float64)
    out = np.repeat(weights.astype(np.float32), sequences.lengths)
    out *= sequences.response_mask
    return out
