"""Scoring of given sequences, shared by all scoring strategies: log-probs, values, or a teacher's states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from roll.backend import Rank
from roll.models.load import PackedInputs, PackedModel
from roll.models.memory_guard import FEWER_TOKENS, readable_memory_errors
from roll.models.offload import Offload, tensors_in
from roll.models.packed_inputs import packed_inputs, spread_to_tokens
from roll.models.sequence_parallel import SequenceGroup
from roll.types import Floats, Sequences

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
