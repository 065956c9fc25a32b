"""Aggregates token losses by a weight for each token, which is fixed before the batch is split.

The loss of an update is `sum(weight * token loss)` over all its tokens, whatever rank or micro-batch they fall in.
The weights of an update's tokens are normalised by the update's own totals, so no split can change the result.
"""

from __future__ import annotations

import numpy as np

from roll.types import Floats, Ints, Sequences

MODES = "token-mean, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm"


def loss_weights(
    sequences: Sequences, mode: str, scale: float = 1.0, sequence_weights: Floats | None = None, episode_of_sequence: Ints | None = None
) -> Floats:
    """Return the weight of each token, [T]; 0 outside the response mask.

    `token-mean` averages over tokens, `seq-mean-token-sum` sums tokens and averages over sequences,
    `seq-mean-token-mean` averages over a sequence's tokens and then over sequences, `seq-mean-token-sum-norm` divides the sum of
    a sequence's tokens by the same number for all and averages over sequences (Dr. GRPO, arXiv 2503.20783, section 3.2).
    A sequence whose mask is empty counts in none. The sequences of one episode count as one sequence in all of them.

    Args:
        scale: the divisor of `seq-mean-token-sum-norm`, in tokens.
        sequence_weights: [N], factors of the sequences' losses; the denominators do not change. None weighs all alike.
        episode_of_sequence: [N]; None if each is an episode of its own.
    """
    of_sequence = np.arange(len(sequences)) if episode_of_sequence is None else np.unique(episode_of_sequence, return_inverse=True)[1]
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
