"""Distributes sequences over a role's replicas for forward passes without a gradient, and reassembles the results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.backend import ScoreStrategy, TeachStrategy
from roll.data import packing
from roll.ray.device_sharing import Residency
from roll.ray.group import WorkerGroup
from roll.types import Floats, Sequences


def share_out(sequences: Sequences, replicas: int, token_budget: int) -> tuple[packing.Split, list[list[Sequences]]]:
    """Split sequences into micro-batches. Return the split, and the micro-batches of each replica."""
    split = packing.split_to_budget(sequences.lengths, replicas, token_budget)
    return split, [[packing.select(sequences, indices) for indices in forwards] for forwards in split.ranks]


def gather_tokens(sequences: Sequences, split: packing.Split, results: Sequence[Sequence[Floats]]) -> Floats:
    """Return the results of all replicas and micro-batches as one array [T], in the order of `sequences`, without the
    filler's values.
    """
    out = np.zeros(len(sequences.token_ids), np.float32)
    for forwards, values in zip(split.ranks, results, strict=True):
        for indices, part in zip(forwards, values, strict=True):
            if indices:
                out[packing.token_positions(sequences.offsets, indices)] = part
    return out


class Reference:
    """Facade of a group that computes log-probs under a model with constant weights."""

    def __init__(
        self,
        group: WorkerGroup[ScoreStrategy],
        token_budget: int,
        temperature: float,
        seconds: float,
        move_seconds: float,
    ) -> None:
        self._group, self._token_budget, self._temperature = group, token_budget, temperature
        self._seconds, self._move_seconds = seconds, move_seconds

    async def ref_log_probs(self, sequences: Sequences) -> Floats:
        """Return the natural log-probs [T] of the response tokens, 0 for other tokens."""
        split, parts = share_out(sequences, self._group.replicas, self._token_budget)
        arguments = [(part, self._temperature) for part in parts]
        results = await self._group.paced.within(self._seconds).each_replica(ScoreStrategy.log_probs, arguments)
        return gather_tokens(sequences, split, results)

    async def offload(self, discard: bool) -> int | None:
        """See `ColocatedRole`. Always keeps the weights."""
        await self._group.within(self._move_seconds).all(ScoreStrategy.offload)
        return await self._group.held_bytes()

    async def onload(self, level: Residency) -> None:
        """See `ColocatedRole`. A reference has only its weights."""
        await self._group.within(self._move_seconds).all(ScoreStrategy.onload)


class Teacher(Reference):
    """Facade of a group with a teacher model for distillation."""

    def __init__(
        self, group: WorkerGroup[TeachStrategy], token_budget: int, seconds: float, move_seconds: float
    ) -> None:
        super().__init__(group, token_budget, 1.0, seconds, move_seconds)
        self._teachers = group

    async def states(self, sequences: Sequences) -> Floats:
        """Return the teacher's outputs [S, W] for the S response tokens in order: hidden states, or another output of
        its wrapper.
        """
        split, parts = share_out(sequences, self._teachers.replicas, self._token_budget)
        results = await self._teachers.paced.within(self._seconds).each_replica(
            TeachStrategy.states, [(part,) for part in parts]
        )
        forwards = [
            pair for rank in zip(split.ranks, results, strict=True) for pair in zip(*rank, strict=True) if pair[0]
        ]
        out = np.empty((int(sequences.response_mask.sum()), forwards[0][1].shape[1]), np.float32)
        for indices, values in forwards:
            out[packing.response_rows(sequences, indices)] = values
        return out
