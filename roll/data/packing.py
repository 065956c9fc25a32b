"""Packs ragged sequences into micro-batches for each rank, and weighs their tokens in the loss. Pure functions.

Under ZeRO every forward pass is a collective operation, so all ranks must run the same number of forward passes.
`split_to_budget` plans the passes of all ranks at once from the sequence lengths, without communication.

The loss of an update is `sum(weight * token loss)` over all its tokens, on all ranks and in all micro-batches.
`loss_weights` are normalised by totals over the whole update, so the split into ranks and micro-batches does not change
the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappush, heapreplace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from roll.types import Bools, Floats, Ints, Pictures, Sequences, TrainBatch

MODES = "token-mean, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm"
Number = TypeVar("Number", np.float32, np.int32)

FILLER = Sequences(np.zeros(2, np.int32), np.array([0, 2], np.int64), np.zeros(2, np.bool_))
"""Two tokens outside the loss: the micro-batch of a rank that has fewer micro-batches than others."""


def concatenate(
    token_ids: Sequence[Ints], response_masks: Sequence[Bools], shown: Sequence[Pictures | None] = ()
) -> Sequences:
    """Concatenate the given sequences without padding.

    Args:
        shown: the pictures of each sequence, or nothing at all.
    """
    offsets = np.cumsum([0] + [len(ids) for ids in token_ids], dtype=np.int64)
    pictures = concatenate_pictures(shown) if any(one is not None for one in shown) else None
    masks = np.concatenate(response_masks)
    return Sequences(np.concatenate(token_ids).astype(np.int32), offsets, masks, shown=pictures)


def concatenate_pictures(shown: Sequence[Pictures | None]) -> Pictures:
    """Return the pictures of N sequences, given those of each one. At least one sequence has a picture.

    Sequences for which the same object is given share its rows.
    """
    parts = [one for one in shown if one is not None]
    distinct = list({id(part): part for part in parts}.values())
    ends = np.cumsum([len(part.values) for part in distinct])
    before = {id(part): end - len(part.values) for part, end in zip(distinct, ends, strict=True)}
    shares = len(distinct) < len(parts) or any(part.shared is not None for part in distinct)
    return Pictures(
        values=np.concatenate([part.values for part in distinct]),
        rows=np.concatenate([part.rows for part in parts]),
        grids=np.concatenate([part.grids for part in parts]),
        starts=np.concatenate([part.starts for part in parts]),
        counts=np.concatenate([np.zeros(1, np.int64) if one is None else one.counts for one in shown]),
        shared=np.concatenate([before[id(part)] + part.begins for part in parts]) if shares else None,
    )


def select_pictures(shown: Pictures, chosen: NDArray[np.int64]) -> Pictures | None:
    """Return the pictures of the chosen sequences, in the order of `chosen`; None if they show none.

    Sequences that share rows still do, and only rows of chosen sequences are left.
    """
    firsts = np.cumsum(shown.counts) - shown.counts
    pictures = [np.arange(firsts[index], firsts[index] + shown.counts[index]) for index in chosen]
    which = np.concatenate([np.empty(0, np.int64), *pictures])
    if not len(which):
        return None
    chosen_begins = shown.begins[which]
    begins, firsts, copies = np.unique(chosen_begins, return_index=True, return_inverse=True)
    rows = shown.rows[which[firsts]]
    if len(begins) == len(which):  # each picture has rows of its own, in the order of the sequences
        begins, rows, copies = chosen_begins, shown.rows[which], None
    ends = begins + rows
    if (begins[1:] == ends[:-1]).all():  # adjacent pictures need no copy
        values = shown.values[begins[0] : ends[-1]]
    else:
        values = np.concatenate([shown.values[begin:end] for begin, end in zip(begins, ends, strict=True)])
    shared = None if copies is None else (np.cumsum(rows) - rows)[copies]
    return Pictures(values, shown.rows[which], shown.grids[which], shown.starts[which], shown.counts[chosen], shared)


def token_positions(offsets: np.ndarray, indices: Sequence[int]) -> np.ndarray:
    """Return the token positions of the chosen sequences, in the order of `indices`."""
    return np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in indices])


@dataclass(frozen=True)
class Selection:
    """Some of a batch's sequences, and their token spans in the batch."""

    sequences: Sequences
    spans: Sequence[slice]
    """Token spans of the chosen sequences in the batch. Adjacent sequences share a span. Empty for the filler."""

    def tokens(self, field: np.ndarray) -> np.ndarray:
        """Return the chosen sequences' part of a per-token field, without a copy if they are adjacent."""
        match self.spans:
            case []:
                return np.zeros(len(self.sequences.token_ids), field.dtype)
            case [only]:
                return field[only]
            case spans:
                return np.concatenate([field[span] for span in spans])


def select_sequences(sequences: Sequences, indices: Sequence[int]) -> Selection:
    """Select sequences in the order of `indices`. Select the filler if there are no indices."""
    if not len(indices):
        return Selection(FILLER, [])
    chosen = np.asarray(indices, np.int64)
    breaks = np.flatnonzero(np.diff(chosen) != 1)
    begins = sequences.offsets[chosen[np.concatenate([[0], breaks + 1])]]
    ends = sequences.offsets[chosen[np.concatenate([breaks, [len(chosen) - 1]])] + 1]
    spans = [slice(begin, end) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    offsets = np.concatenate([[0], np.cumsum(sequences.lengths[chosen])]).astype(np.int64)
    of_batch = Selection(sequences, spans)
    routes = None if sequences.routes is None else of_batch.tokens(sequences.routes)
    token_ids, in_loss = of_batch.tokens(sequences.token_ids), of_batch.tokens(sequences.response_mask)
    shown = None if sequences.shown is None else select_pictures(sequences.shown, chosen)
    return Selection(Sequences(token_ids, offsets, in_loss, routes, shown), spans)


def select(sequences: Sequences, indices: Sequence[int]) -> Sequences:
    """Return the chosen sequences in the order of `indices`, or the filler if there are none."""
    return select_sequences(sequences, indices).sequences


def select_tokens(field: NDArray[Number], sequences: Sequences, indices: Sequence[int]) -> NDArray[Number]:
    """Return a per-token field of the chosen sequences, or zeros for the filler if there are no indices."""
    return select_sequences(replace(sequences, shown=None), indices).tokens(field)


def members_of(examples: Sequence[int], sequences_per_example: int) -> list[int]:
    """Return the sequence indices of the chosen examples, in the order of `examples`."""
    if sequences_per_example == 1:
        return list(examples)
    return [index * sequences_per_example + number for index in examples for number in range(sequences_per_example)]


def updates_of(batch: TrainBatch, updates: int) -> list[list[int]]:
    """Return the sequence indices of each update, in order. No example and no episode is split over updates."""
    if batch.episode_of_sequence is None:
        parts = np.array_split(np.arange(batch.example_count), updates)
        return [members_of(part.tolist(), batch.sequences_per_example) for part in parts]
    firsts = np.append(np.unique(batch.episode_of_sequence, return_index=True)[1], len(batch))
    parts = np.array_split(np.arange(len(firsts) - 1), updates)
    return [list(range(firsts[part[0]], firsts[part[-1] + 1])) if len(part) else [] for part in parts]


def example_lengths(sequences: Sequences, sequences_per_example: int) -> NDArray[np.int64]:
    """Return the number of tokens of each example, [examples]."""
    return sequences.lengths.reshape(-1, sequences_per_example).sum(axis=1)


def response_rows(sequences: Sequences, indices: Sequence[int]) -> NDArray[np.int64]:
    """Return the positions of the chosen sequences' response tokens among all response tokens. The filler has none."""
    if not len(indices):
        return np.empty(0, np.int64)
    rows = np.cumsum(sequences.response_mask) - 1
    where = token_positions(sequences.offsets, indices)
    return rows[where][sequences.response_mask[where]]


def take_sequences(batch: TrainBatch, indices: Sequence[int]) -> TrainBatch:
    """Return the chosen sequences of a batch, or the filler without any. `indices` must cover whole examples."""
    chosen = select_sequences(batch.sequences, indices)

    def if_given(field: np.ndarray | None) -> np.ndarray | None:
        return None if field is None else chosen.tokens(field)

    return TrainBatch(
        chosen.sequences,
        chosen.tokens(batch.advantages),
        if_given(batch.behaviour_log_probs),
        chosen.tokens(batch.policy_versions),
        if_given(batch.ref_log_probs),
        if_given(batch.proximal_log_probs),
        if_given(batch.token_selection),
        None if batch.sequence_weights is None else batch.sequence_weights[list(indices)],
        None if batch.episode_of_sequence is None else batch.episode_of_sequence[list(indices)],
        labels=None if batch.labels is None else batch.labels[list(indices)],
        teacher_states=None
        if batch.teacher_states is None
        else batch.teacher_states[response_rows(batch.sequences, indices)],
        values=if_given(batch.values),
        returns=if_given(batch.returns),
        sequences_per_example=batch.sequences_per_example if len(indices) else 1,
    )


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


@dataclass(frozen=True)
class Split:
    """Sequence indices of every micro-batch of every rank."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """`ranks[rank][forward]` holds the indices of one micro-batch. It may be empty."""

    @property
    def forwards(self) -> int:
        """Number of forward passes, the same on every rank."""
        return len(self.ranks[0])


def split_to_budget(
    lengths: Sequence[int] | np.ndarray,
    ranks: int,
    token_budget: int,
    attention_cost: float = 0.0,
    sequences_per_example: int = 1,
) -> Split:
    """Distribute sequences over ranks by cost and pack each rank's share into micro-batches.

    Args:
        lengths: number of tokens of each sequence.
        ranks: number of ranks.
        token_budget: largest number of tokens of a micro-batch. A longer example gets a micro-batch of its own.
        attention_cost: see `cost`.
        sequences_per_example: number of adjacent sequences that stay together.

    Returns:
        A split with every index exactly once, and the same number of micro-batches on every rank. Some may be empty.
    """
    of_sequence = np.asarray(lengths, np.int64)
    costs = cost(of_sequence, attention_cost).reshape(-1, sequences_per_example).sum(axis=1)
    tokens = of_sequence.reshape(-1, sequences_per_example).sum(axis=1)
    shares = balance(costs, ranks)
    forwards = 1
    while True:
        packed = [pack(tokens, share, token_budget, forwards) for share in shares]
        most = max(map(len, packed))
        if most <= forwards:
            break
        forwards = most
    bins = [[tuple(members_of(examples, sequences_per_example)) for examples in rank] for rank in packed]
    return Split(tuple(tuple(rank) + ((),) * (forwards - len(rank)) for rank in bins))


def cost(lengths: NDArray[np.int64], attention_cost: float) -> NDArray[np.float64]:
    """Return the costs [N], in tokens: length + attention_cost x length^2. See `ModelShape.attention_cost`."""
    return lengths + attention_cost * lengths**2


def balance(costs: Sequence[float] | np.ndarray, ranks: int) -> list[list[int]]:
    """Distribute sequences over ranks: the most expensive first, each to the rank with the smallest total cost so far.

    Return the indices of each rank in ascending order.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    # A heap; ties go to the rank with fewer sequences, then to the first.
    lightest = [(0.0, 0, rank) for rank in range(ranks)]
    for index, own in dearest_first(costs):
        load, count, rank = lightest[0]
        shares[rank].append(index)
        heapreplace(lightest, (load + own, count + 1, rank))
    return [sorted(share) for share in shares]


def dearest_first(costs: Sequence[float] | np.ndarray) -> Iterator[tuple[int, float]]:
    """Yield (index, cost) in order of decreasing cost. Equal costs keep their order."""
    values = np.asarray(costs)
    order = np.argsort(-values, kind="stable")
    return zip(order.tolist(), values[order].tolist(), strict=True)


def pack(lengths: Sequence[int] | np.ndarray, indices: Sequence[int], token_budget: int, bins: int) -> list[list[int]]:
    """Pack sequences into bins: the longest first, each into the emptiest bin, or into a new bin if that one would
    exceed the budget.

    Return the indices of each bin in ascending order.

    Args:
        lengths: number of tokens of every sequence.
        indices: the sequences to pack.
        token_budget: largest number of tokens of a bin with several sequences.
        bins: number of bins to start with.
    """
    chosen = np.sort(np.asarray(indices, np.int64))
    packed: list[list[int]] = [[] for _ in range(min(bins, len(chosen)))]
    # A heap: if the first bin has no room, none has.
    emptiest: list[tuple[float, int]] = [(0, number) for number in range(len(packed))]
    for index, length in dearest_first(np.asarray(lengths, np.int64)[chosen]):
        load, number = emptiest[0]
        if packed[number] and load + length > token_budget:
            heappush(emptiest, (length, len(packed)))
            packed.append([index])
        else:
            heapreplace(emptiest, (load + length, number))
            packed[number].append(index)
    return [chosen[sorted(bin_)].tolist() for bin_ in packed]
