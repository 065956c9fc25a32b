"""Scoring of given sequences, shared by all scoring strategies: log-probs, values, or a teacher's states.

Converts ragged numpy sequences into model inputs, and model outputs back into numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from roll.backend import Rank
from roll.models.load import PackedInputs, PackedModel
from roll.models.memory_guard import FEWER_TOKENS, readable_memory_errors
from roll.models.offload import Offload, tensors_in
from roll.models.sequence_parallel import SequenceGroup, TokenShare
from roll.types import Floats, Sequences


def packed_inputs(
    sequences: Sequences,
    device: str,
    temperature: float = 1.0,
    teacher_states: Floats | None = None,
    over: SequenceGroup | None = None,
) -> PackedInputs:
    """Return the micro-batch as model inputs on `device`. The response mask must not contain the first token of a
    sequence.

    Args:
        teacher_states: [S, H'], the teacher's output for the response tokens.
        over: The ranks that split the tokens of the micro-batch, with sequence parallelism.
    """
    assert not sequences.response_mask[sequences.offsets[:-1]].any(), (
        "the first token of a sequence cannot be a response token"
    )
    scored, share = np.flatnonzero(sequences.response_mask), None
    if over is not None:
        sequences = filled_up(sequences, over.size)
        share = TokenShare(over, len(sequences.token_ids) // over.size, scored)
        teacher_states = None if teacher_states is None else teacher_states[share.rows(back=1)]
    positions = np.arange(len(sequences.token_ids)) - np.repeat(sequences.offsets[:-1], sequences.lengths)

    return PackedInputs(
        token_ids=to_device(sequences.token_ids.astype(np.int64), device),
        position_ids=to_device(positions, device),
        cu_seq_lens=to_device(sequences.offsets.astype(np.int32), device),
        max_length=int(sequences.lengths.max()),
        scored=to_device(scored, device),
        temperature=temperature,
        teacher_states=None if teacher_states is None else to_device(teacher_states, device),
        share=share,
    )


def filled_up(sequences: Sequences, multiple: int) -> Sequences:
    """Pad the number of tokens to a multiple. The padding is a separate sequence outside the response mask."""
    missing = -len(sequences.token_ids) % multiple
    if not missing:
        return sequences
    offsets = np.append(sequences.offsets, len(sequences.token_ids) + missing)
    return Sequences(np.pad(sequences.token_ids, (0, missing)), offsets, np.pad(sequences.response_mask, (0, missing)))


def to_device(values: np.ndarray, device: str) -> Tensor:
    """Copy an array to the device. Copies to CUDA use pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device == "cuda" else tensor.to(device)


def scored_only(field: Floats, sequences: Sequences, device: str) -> Tensor:
    """Return the values of a per-token field [T] at the response tokens, fp32 [S] on `device`."""
    return to_device(field[sequences.response_mask].astype(np.float32, copy=False), device)


def spread_to_tokens(values: Tensor, sequences: Sequences) -> Floats:
    """Return an array [T] with the values [S] at the response tokens and 0 elsewhere."""
    out = np.zeros(len(sequences.token_ids), np.float32)
    out[sequences.response_mask] = values.float().cpu().numpy()
    return out


Forward = Callable[[PackedInputs], tuple[Tensor, ...]]
"""Forward pass of a `PackedModel` or of an engine around it."""


def score(
    forward: Forward,
    micro_batches: Sequence[Sequences],
    temperature: float,
    rank: Rank,
    over: SequenceGroup | None = None,
) -> list[Floats]:
    """Return the first output of `forward` for each micro-batch, as [T] with 0 outside the response mask. The caller
    disables gradients.

    Args:
        over: The ranks that split the tokens of each micro-batch, with sequence parallelism.

    Raises:
        DeviceMemoryError: a micro-batch is too large for the device.
    """
    with readable_memory_errors(rank, "scoring", FEWER_TOKENS):
        # Read results only after all micro-batches are queued, so that the device does not wait for the host between
        # them.
        scores = [forward(packed_inputs(part, rank.device, temperature, over=over))[0] for part in micro_batches]
    return [spread_to_tokens(values, part) for values, part in zip(scores, micro_batches, strict=True)]


def states(forward: Forward, micro_batches: Sequence[Sequences], rank: Rank) -> list[Floats]:
    """Return a teacher's output for the S response tokens of each micro-batch: hidden states [S, H], or its encoded top
    k.

    Raises:
        DeviceMemoryError: a micro-batch is too large for the device.
    """
    with readable_memory_errors(rank, "computing the teacher's states", FEWER_TOKENS):
        return [forward(packed_inputs(part, rank.device))[0].float().cpu().numpy() for part in micro_batches]


class PackedScore:
    """Base class of scoring strategies. Scores with a loaded model, or with a teacher model as a `TeachStrategy`."""

    def __init__(self, policy: PackedModel, forward: Forward, rank: Rank, offload: Offload) -> None:
        """Store the model. `forward` runs `policy` in eval mode: it is the model itself, or an engine around it."""
        self._policy, self._forward, self._rank, self._offload = policy, forward, rank, offload

    @torch.no_grad()
    def log_probs(self, micro_batches: Sequence[Sequences], temperature: float) -> list[Floats]:
        """See `ScoreStrategy`."""
        return score(self._forward, micro_batches, temperature, self._rank)

    @torch.no_grad()
    def states(self, micro_batches: Sequence[Sequences]) -> list[Floats]:
        """See `TeachStrategy`."""
        return states(self._forward, micro_batches, self._rank)

    def offload(self) -> None:
        """See `ScoreStrategy`."""
        self._offload.offload(tensors_in([*self._policy.parameters(), *self._policy.buffers()]))

    def onload(self) -> None:
        """See `ScoreStrategy`."""
        with readable_memory_errors(self._rank, "returning to the device"):
            self._offload.onload()
