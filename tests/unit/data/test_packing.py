"""Sharing sequences out over ranks, packing them into micro-batches, and selecting parts of a batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.data.packing import (
    FILLER,
    balance,
    concatenate,
    cost,
    pack,
    select,
    select_tokens,
    split_to_budget,
    take_sequences,
    token_positions,
    updates_of,
)
from roll.types import Sequences, TrainBatch

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@given(lengths=LENGTHS, ranks=st.integers(1, 5), budget=st.integers(1, 120))
def test_split_assigns_every_index_once_with_equal_forwards(lengths: list[int], ranks: int, budget: int) -> None:
    found = split_to_budget(lengths, ranks, budget)
    assert len(found.ranks) == ranks
    assert {len(forwards) for forwards in found.ranks} == {found.forwards}
    assert found.forwards >= 1
    assert sorted(index for forwards in found.ranks for indices in forwards for index in indices) == list(
        range(len(lengths))
    )


@given(lengths=LENGTHS, ranks=st.integers(1, 5), budget=st.integers(1, 120))
def test_micro_batch_exceeds_budget_for_single_sequence_only(lengths: list[int], ranks: int, budget: int) -> None:
    for forwards in split_to_budget(lengths, ranks, budget).ranks:
        for indices in forwards:
            assert len(indices) <= 1 or sum(lengths[index] for index in indices) <= budget


@given(lengths=LENGTHS, ranks=st.integers(1, 5), budget=st.integers(1, 120))
def test_split_needs_at_most_twice_the_minimum_forwards(lengths: list[int], ranks: int, budget: int) -> None:
    # A bin is added when a sequence fits into no other. As the longest sequences go first, each other bin is then more
    # than half full.
    heaviest = max(sum(lengths[index] for index in share) for share in balance(lengths, ranks))
    longer = sum(length > budget for length in lengths)
    assert split_to_budget(lengths, ranks, budget).forwards <= 1 + longer + 2 * heaviest // budget


@given(lengths=LENGTHS, ranks=st.integers(1, 5))
def test_ranks_differ_by_one_sequence_at_most(lengths: list[int], ranks: int) -> None:
    loads = [sum(lengths[index] for index in share) for share in balance(lengths, ranks)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_balance_by_hand() -> None:
    # 9 goes to the first rank, 7 to the second, 5 to the second (12), 4 to the first (13), 2 to the second (14), 1 to
    # the first (14).
    assert balance([1, 2, 4, 5, 7, 9], 2) == [[0, 2, 5], [1, 3, 4]]


def test_long_sequence_costs_more_than_many_short() -> None:
    # The long sequence costs 40 + 16, a short one 10 + 1: with these costs, all six short ones go to the other rank.
    lengths = [40, *[10] * 6]
    costs = cost(np.array(lengths), 0.01)
    assert costs.tolist() == [56, *[11] * 6]
    assert balance(lengths, 2) == [[0, 5], [1, 2, 3, 4, 6]]
    assert balance(costs, 2) == [[0], [1, 2, 3, 4, 5, 6]]
    assert split_to_budget(lengths, 2, 1000, attention_cost=0.01).ranks == (((0,),), ((1, 2, 3, 4, 5, 6),))


def balanced_by_looking(costs: list[float], ranks: int) -> list[list[int]]:
    """Compute the result of `balance` by comparing all ranks for every sequence."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        loads = [sum(sorted((costs[index] for index in share), reverse=True)) for share in shares]
        lightest = min(range(ranks), key=lambda rank: (loads[rank], len(shares[rank]), rank))
        shares[lightest].append(index)
    return [sorted(share) for share in shares]


def packed_by_looking(lengths: list[int], indices: list[int], token_budget: int, bins: int) -> list[list[int]]:
    """Compute the result of `pack` by comparing all bins for every sequence."""
    order = sorted(indices, key=lambda index: (-lengths[index], index))
    packed: list[list[int]] = [[] for _ in range(min(bins, len(order)))]
    for index in order:
        loads = [sum(lengths[index] for index in bin_) for bin_ in packed]
        fits = [
            number for number, bin_ in enumerate(packed) if not bin_ or loads[number] + lengths[index] <= token_budget
        ]
        if fits:
            packed[min(fits, key=lambda number: (loads[number], number))].append(index)
        else:
            packed.append([index])
    return [sorted(bin_) for bin_ in packed]


@given(costs=st.lists(st.integers(1, 9).map(lambda cost: cost / 8), max_size=40), ranks=st.integers(1, 5))
def test_balance_is_what_looking_at_every_rank_gives(costs: list[float], ranks: int) -> None:
    assert balance(costs, ranks) == balanced_by_looking(costs, ranks)


@given(lengths=LENGTHS, budget=st.integers(1, 120), bins=st.integers(1, 6), drawn=st.data())
def test_pack_is_what_looking_at_every_bin_gives(
    lengths: list[int], budget: int, bins: int, drawn: st.DataObject
) -> None:
    indices = drawn.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True)) if lengths else []
    assert pack(lengths, indices, budget, bins) == packed_by_looking(lengths, indices, budget, bins)


def test_pack_by_hand() -> None:
    assert pack([5, 3, 3, 9], [0, 1, 2, 3], token_budget=8, bins=1) == [[3], [0, 1], [2]]
    assert pack([5, 3], [0, 1], token_budget=100, bins=2) == [[0], [1]]
    assert pack([5, 3], [], token_budget=100, bins=2) == []


def test_rank_without_sequences_gets_empty_forwards() -> None:
    assert split_to_budget([4, 4], ranks=3, token_budget=4).ranks == (((0,),), ((1,),), ((),))
    assert split_to_budget([], ranks=2, token_budget=4).ranks == (((),), ((),))
    assert split_to_budget([8, 8, 8], ranks=2, token_budget=8).ranks == (((0,), (2,)), ((1,), ()))


def test_rank_spreads_sequences_over_all_forwards() -> None:
    # Rank 0 has two long sequences and needs two forwards. Rank 1 has one long and two short sequences, which also fill
    # two forwards.
    found = split_to_budget([10, 10, 10, 5, 5], ranks=2, token_budget=10)
    assert found.forwards == 2
    assert all(indices for forwards in found.ranks for indices in forwards)


def three() -> Sequences:
    return concatenate(
        [np.array([1, 2], np.int32), np.array([3, 4, 5], np.int32), np.array([6], np.int32)],
        [np.array([False, True]), np.array([False, False, True]), np.array([False])],
    )


def test_concatenate_lays_end_to_end() -> None:
    sequences = three()
    assert sequences.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert sequences.token_ids.dtype == np.int32
    assert sequences.offsets.tolist() == [0, 2, 5, 6]
    assert sequences.lengths.tolist() == [2, 3, 1]
    assert sequences.response_mask.tolist() == [False, True, False, False, True, False]
    assert len(sequences) == 3


def test_select_returns_sequences_and_fields_in_requested_order() -> None:
    sequences = three()
    chosen = select(sequences, [2, 0])
    assert chosen.token_ids.tolist() == [6, 1, 2]
    assert chosen.offsets.tolist() == [0, 1, 3]
    assert chosen.response_mask.tolist() == [False, False, True]
    assert token_positions(sequences.offsets, [2, 0]).tolist() == [5, 0, 1]
    assert select_tokens(np.arange(6, dtype=np.float32), sequences, [2, 0]).tolist() == [5, 0, 1]


def test_selecting_nothing_gives_the_filler() -> None:
    sequences = three()
    assert select(sequences, []) is FILLER
    assert not FILLER.response_mask.any()
    assert len(FILLER) == 1
    field = select_tokens(np.arange(6, dtype=np.int32), sequences, [])
    assert field.tolist() == [0] * len(FILLER.token_ids)
    assert field.dtype == np.int32


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_selected_parts_of_split_cover_every_token_once(budget: int) -> None:
    lengths = [3, 1, 8, 2, 2, 5]
    sequences = concatenate(
        [np.full(n, i, np.int32) for i, n in enumerate(lengths)], [np.zeros(n, np.bool_) for n in lengths]
    )
    numbers = np.arange(sum(lengths), dtype=np.int32)
    parts = [indices for forwards in split_to_budget(lengths, 2, budget).ranks for indices in forwards if indices]
    assert sorted(np.concatenate([select_tokens(numbers, sequences, indices) for indices in parts])) == list(
        range(sum(lengths))
    )


def drawn_batch(lengths: list[int], episodes: list[int] | None) -> TrainBatch:
    """Return a batch whose numbers per token differ between tokens and, at each token, between fields."""
    sequences = concatenate(
        [np.arange(100 * i, 100 * i + n, dtype=np.int32) for i, n in enumerate(lengths)],
        [np.arange(n) % 3 > 0 for n in lengths],
    )
    tokens = np.arange(len(sequences.token_ids))
    fields = [(tokens + 1000 * number).astype(np.float32) for number in range(1, 6)]
    return TrainBatch(
        sequences,
        fields[0],
        None,
        tokens.astype(np.int32) + 7000,
        ref_log_probs=fields[1],
        token_selection=tokens % 2 == 0,
        sequence_weights=np.arange(len(lengths), dtype=np.float32),
        episode_of_sequence=None if episodes is None else np.array(episodes, np.int32),
        teacher_states=np.arange(2 * int(sequences.response_mask.sum()), dtype=np.float32).reshape(-1, 2),
        values=fields[2],
        returns=fields[3],
    )


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12), drawn=st.data())
def test_taking_sequences_takes_their_tokens_in_every_field(lengths: list[int], drawn: st.DataObject) -> None:
    """Compare token by token, for neighbouring sequences (which are taken as one slice) and for others."""
    batch, indices = drawn_batch(lengths, None), drawn.draw(st.permutations(range(len(lengths))))
    indices = indices[: drawn.draw(st.integers(1, len(lengths)))]
    if drawn.draw(st.booleans()):
        indices = list(range(min(indices), max(indices) + 1))
    taken, starts = take_sequences(batch, indices), [sum(lengths[:index]) for index in range(len(lengths))]
    tokens = [token for index in indices for token in range(starts[index], starts[index] + lengths[index])]
    rows = {int(token): row for row, token in enumerate(np.flatnonzero(batch.sequences.response_mask))}
    assert taken.sequences.offsets.tolist() == [0, *np.cumsum([lengths[index] for index in indices]).tolist()]
    for got, whole in [
        (taken.sequences.token_ids, batch.sequences.token_ids),
        (taken.sequences.response_mask, batch.sequences.response_mask),
        *[
            (getattr(taken, name), getattr(batch, name))
            for name in ("advantages", "policy_versions", "ref_log_probs", "token_selection")
        ],
        *[(getattr(taken, name), getattr(batch, name)) for name in ("values", "returns")],
    ]:
        assert got.tolist() == [whole[token] for token in tokens] and got.dtype == whole.dtype
    assert taken.sequence_weights is not None and taken.sequence_weights.tolist() == indices
    assert taken.teacher_states is not None and batch.teacher_states is not None
    assert taken.teacher_states.tolist() == [
        batch.teacher_states[rows[token]].tolist() for token in tokens if token in rows
    ]


@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=12), updates=st.integers(1, 5))
def test_updates_are_whole_episodes_in_their_order(sizes: list[int], updates: int) -> None:
    """Episode numbers may have gaps."""
    episodes = [3 * number for number, size in enumerate(sizes) for _ in range(size)]
    found = updates_of(drawn_batch([2] * len(episodes), episodes), updates)
    shares = np.array_split(np.unique(episodes), updates)
    assert found == [[index for index, episode in enumerate(episodes) if episode in share] for share in shares]


@given(masks=st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=8))
def test_response_lengths_are_counted_one_by_one(masks: list[list[bool]]) -> None:
    """The cases include sequences without tokens."""
    sequences = concatenate(
        [np.zeros(len(mask), np.int32) for mask in masks], [np.array(mask, np.bool_) for mask in masks]
    )
    assert sequences.response_lengths.tolist() == [sum(mask) for mask in masks]


def test_labels_move_with_their_sequences() -> None:
    sequences = concatenate(
        [np.full(length, length, np.int32) for length in (2, 3, 4, 5)], [np.arange(n) > 0 for n in (2, 3, 4, 5)]
    )
    labels = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    batch = TrainBatch(sequences, np.zeros(14, np.float32), None, np.zeros(14, np.int32), labels=labels)
    for indices in ([3, 0, 2], [1], [2, 1, 0, 3], []):
        taken = take_sequences(batch, indices)
        assert taken.labels is not None and taken.labels.tolist() == indices
    assert take_sequences(take_sequences(batch, [3, 0, 2]), [1, 2]).labels.tolist() == [0, 2]  # pyright: ignore[reportOptionalMemberAccess]


def test_a_filler_is_one_example_also_among_pairs() -> None:
    sequences = concatenate([np.arange(2, dtype=np.int32)] * 4, [np.arange(2) > 0] * 4)
    pairs = TrainBatch(sequences, np.zeros(8, np.float32), None, np.zeros(8, np.int32), sequences_per_example=2)
    assert (
        take_sequences(pairs, []).example_count == 1
        and take_sequences(pairs, [2, 3]).example_count == 1
        and take_sequences(pairs, [0, 1, 2, 3]).example_count == 2
    )
