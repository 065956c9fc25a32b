"""Scoring of given sequences, common to all scoring strategies: log-probs, values, or a teacher's states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from roll.models.load import PackedInputs, PackedModel
from roll.models.packed_inputs import packed_inputs, spread
from roll.models.sequence_parallel import SequenceGroup
from roll.strategies.base import Rank
from roll.strategies.memory_guard import FEWER_TOKENS, told_of_memory
from roll.strategies.offload import Offload, tensors_in
from roll.types import Floats, Sequences

Forward = Callable[[PackedInputs], tuple[Tensor, ...]]
"""Forward pass of a `PackedModel` or of an engine around it."""


def score(
    forward: Forward, micro_batches: Sequence[Sequences], temperature: float, rank: Rank, over: SequenceGroup | None = None
) -> list[Floats]:
    """Return [T] for each micro-batch, 0 outside the response mask. The caller disables gradients.

    Args:
        over: the ranks that share the tokens of each micro-batch out, if any do.

    Raises:
        DeviceMemoryError: a micro-batch is too large for the device.
    """
    with told_of_memory(rank, "scoring", FEWER_TOKENS):
        # Read after all micro-batches are queued, so that the device does not wait for the host between two of them.
        scores = [forward(packed_inputs(part, rank.device, temperature, over=over))[0] for part in micro_batches]
    return [spread(values, part) for values, part in zip(scores, micro_batches, strict=True)]


def states(forward: Forward, micro_batches: Sequence[Sequences], rank: Rank) -> list[Floats]:
    """Return [S, H] for each micro-batch, from which a `PackedTeacher` predicts its S response tokens.

    Raises:
        DeviceMemoryError: a micro-batch is too large for the device.
    """
    with told_of_memory(rank, "reading", FEWER_TOKENS):
        return [forward(packed_inputs(part, rank.device))[0].float().cpu().numpy() for part in micro_batches]


class PackedScore:
    """Scores with a loaded model, for backends of `ScoreStrategy` and, with a `PackedTeacher`, of `TeachStrategy`."""

    def __init__(self, policy: PackedModel, forward: Forward, rank: Rank, offload: Offload) -> None:
        """`forward` runs `policy` in eval mode: the model itself, or an engine around it."""
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
        with told_of_memory(self._rank, "coming back"):
            self._offload.onload()
