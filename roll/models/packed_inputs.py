"""From ragged numpy sequences to what a model reads, and back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from roll.models.load import PackedInputs
from roll.types import Floats, Sequences


def packed_inputs(sequences: Sequences, device: str) -> PackedInputs:
    """The micro-batch on `device`. The first token of a sequence is predicted by nothing and must not be masked in."""
    starts = sequences.offsets[:-1]
    assert not sequences.response_mask[starts].any(), "the first token of a sequence cannot be a response token"
    positions = np.arange(len(sequences.token_ids)) - np.repeat(starts, sequences.lengths)

    def move(values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype, non_blocking=True)

    return PackedInputs(
        token_ids=move(sequences.token_ids, torch.int64),
        position_ids=move(positions, torch.int64),
        cu_seq_lens=move(sequences.offsets, torch.int32),
        max_length=int(sequences.lengths.max()),
        scored=move(np.flatnonzero(sequences.response_mask), torch.int64),
    )


def scored_only(field: Floats, sequences: Sequences, device: str) -> Tensor:
    """A per-token field at the response tokens, fp32 [S] on `device`."""
    return torch.from_numpy(field[sequences.response_mask]).to(device=device, dtype=torch.float32, non_blocking=True)


def spread(values: Tensor, sequences: Sequences) -> Floats:
    """[S] values of the response tokens to [T], 0 elsewhere."""
    out = np.zeros(len(sequences.token_ids), np.float32)
    out[sequences.response_mask] = values.float().cpu().numpy()
    return out
