"""Ragged sequences to micro-batches: which rank trains what, in which forward pass. Pure functions.

Under ZeRO every forward pass is a collective, so all ranks must run the same number of them. `split` decides
for all ranks at once, by counting, not by communicating.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from roll.types import Bools, Ints, Sequences, TrainBatch

Number = TypeVar("Number", np.float32, np.int32)

FILLER = Sequences(np.zeros(2, np.int32), np.array([0, 2], np.int64), np.zeros(2, np.bool_))
"""Two tokens that enter no loss: what a rank runs when it has fewer micro-batches than the others."""


def concatenate(token_ids: Sequence[Ints], response_masks: Sequence[Bools]) -> Sequences:
    """Lay sequences end to end."""
    offsets = np.cumsum([0] + [len(ids) for ids in token_ids], dtype=np.int64)
    return Sequences(np.concatenate(token_ids).astype(np.int32), offsets, np.concatenate(response_masks))


def positions(offsets: np.ndarray, indices: Sequence[int]) -> np.ndarray:
    """Token positions of the chosen sequences, in their order."""
    return np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in indices])


def select(sequences: Sequences, indices: Sequence[int]) -> Sequences:
    """The chosen sequences, in their order; no index gives the filler."""
    if not len(indices):
        return FILLER
    where = positions(sequences.offsets, indices)
    offsets = np.cumsum(np.concatenate([[0], sequences.lengths[list(indices)]]), dtype=np.int64)
    return Sequences(sequences.token_ids[where], offsets, sequences.response_mask[where])


def select_tokens(field: NDArray[Number], sequences: Sequences, indices: Sequence[int]) -> NDArray[Number]:
    """A per-token field of the chosen sequences; no index gives the filler's zeros."""
    if not len(indices):
        return np.zeros(len(FILLER.token_ids), field.dtype)
    return field[positions(sequences.offsets, indices)]


def members(examples: Sequence[int], sequences_per_example: int) -> list[int]:
    """The sequences of the chosen examples, in their order."""
    return [index * sequences_per_example + number for index in examples for number in range(sequences_per_example)]


def updates_of(batch: TrainBatch, updates: int) -> list[list[int]]:
    """The sequences of each update, in the order of the batch: whole examples, and all sequences of an episode in one update."""
    if batch.episode_of_sequence is None:
        parts = np.array_split(np.arange(batch.example_count), updates)
        return [members(part.tolist(), batch.sequences_per_example) for part in parts]
    episodes = np.unique(batch.episode_of_sequence)
    return [np.flatnonzero(np.isin(batch.episode_of_sequence, part)).tolist() for part in np.array_split(episodes, updates)]


def example_lengths(sequences: Sequences, sequences_per_example: int) -> NDArray[np.int64]:
    """[examples], tokens of each."""
    return sequences.lengths.reshape(-1, sequences_per_example).sum(axis=1)


def response_rows(sequences: Sequences, indices: Sequence[int]) -> NDArray[np.int64]:
    """Where the chosen sequences' response tokens stand among all response tokens; the filler has none."""
    if not len(indices):
        return np.empty(0, np.int64)
    rows = np.cumsum(sequences.response_mask) - 1
    where = positions(sequences.offsets, indices)
    return rows[where][sequences.response_mask[where]]


def take(batch: TrainBatch, indices: Sequence[int]) -> TrainBatch:
    """The chosen sequences of a batch, whole examples of them; no index gives the filler."""
    sequences = batch.sequences

    def tokens(field: np.ndarray) -> np.ndarray:
        return select_tokens(field, sequences, indices)

    def if_given(field: np.ndarray | None) -> np.ndarray | None:
        return None if field is None else tokens(field)

    return TrainBatch(
        select(sequences, indices),
        tokens(batch.advantages),
        if_given(batch.behaviour_log_probs),
        tokens(batch.policy_versions),
        if_given(batch.ref_log_probs),
        if_given(batch.proximal_log_probs),
        if_given(batch.token_selection),
        None if batch.sequence_weights is None else batch.sequence_weights[list(indices)],
        None if batch.episode_of_sequence is None else batch.episode_of_sequence[list(indices)],
        labels=None if batch.labels is None else batch.labels[list(indices)],
        teacher_states=None if batch.teacher_states is None else batch.teacher_states[response_rows(sequences, indices)],
        values=if_given(batch.values),
        returns=if_given(batch.returns),
        sequences_per_example=batch.sequences_per_example if len(indices) else 1,
    )


@dataclass(frozen=True)
class Split:
    """Sequence indices by rank and micro-batch: `ranks[rank][forward]` is a list of indices, perhaps empty."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def forwards(self) -> int:
        """Forward passes, the same on every rank."""
        return len(self.ranks[0])


def split(
    lengths: Sequence[int] | np.ndarray, ranks: int, token_budget: int, attention_cost: float = 0.0, sequences_per_example: int = 1
) -> Split:
    """Share sequences over ranks by their cost and pack each rank's share into micro-batches.

    Args:
        lengths: tokens of each sequence.
        ranks: number of ranks.
        token_budget: tokens of a micro-batch; a longer sequence gets one of its own.
        attention_cost: see `cost`.
        sequences_per_example: so many neighbours stay together.

    Returns:
        Every index exactly once; the same number of micro-batches on every rank (empty ones where a rank has no more).
    """
    costs = np.array([cost(int(length), attention_cost) for length in lengths]).reshape(-1, sequences_per_example).sum(axis=1)
    tokens = np.asarray(lengths).reshape(-1, sequences_per_example).sum(axis=1)
    shares = balance(costs, ranks)
    forwards = 1
    while True:
        packed = [pack(tokens, share, token_budget, forwards) for share in shares]
        most = max(map(len, packed))
        if most <= forwards:
            break
        forwards = most
    bins = [[tuple(members(examples, sequences_per_example)) for examples in rank] for rank in packed]
    return Split(tuple(tuple(rank) + ((),) * (forwards - len(rank)) for rank in bins))


def cost(length: int, attention_cost: float) -> float:
    """Work on a sequence in tokens: each is processed, and attends to those before it at `attention_cost` (`ModelShape`) each."""
    return length + attention_cost * length**2


def balance(costs: Sequence[float] | np.ndarray, ranks: int) -> list[list[int]]:
    """Dearest first, each to the rank with the least cost so far; every rank's share in ascending order."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        lightest = min(range(ranks), key=lambda rank: (loads[rank], len(shares[rank]), rank))
        shares[lightest].append(index)
        loads[lightest] += costs[index]
    return [sorted(share) for share in shares]


def pack(lengths: Sequence[int] | np.ndarray, indices: Sequence[int], token_budget: int, bins: int) -> list[list[int]]:
    """Longest first, each into the emptiest of `bins` bins, or into a new one where the token budget allows no other."""
    order = sorted(indices, key=lambda i: (-int(lengths[i]), i))
    packed: list[list[int]] = [[] for _ in range(min(bins, len(order)))]
    loads = [0] * len(packed)
    for index in order:
        length = int(lengths[index])
        fits = [b for b in range(len(packed)) if not packed[b] or loads[b] + length <= token_budget]
        if not fits:
            packed.append([])
            loads.append(0)
            fits = [len(packed) - 1]
        emptiest = min(fits, key=lambda b: (loads[b], b))
        packed[emptiest].append(index)
        loads[emptiest] += length
    return [sorted(bin_) for bin_ in packed]
