"""Loss weights of every aggregation mode: by hand, against a count of tokens, and over every split of an update."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.data.packing import concatenate, loss_weights, select_tokens, split_to_budget
from roll.types import Sequences

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
SCALE = 8.0


def responses(*masks: str) -> Sequences:
    return concatenate(
        [np.zeros(len(mask), np.int32) for mask in masks],
        [np.array([letter == "x" for letter in mask]) for mask in masks],
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [0, 1 / 4, 0, 0, 1 / 4, 1 / 4, 1 / 4, 0, 0]),
        ("seq-mean-token-sum", [0, 1 / 2, 0, 0, 1 / 2, 1 / 2, 1 / 2, 0, 0]),
        ("seq-mean-token-mean", [0, 1 / 2, 0, 0, 1 / 6, 1 / 6, 1 / 6, 0, 0]),
        ("seq-mean-token-sum-norm", [0, 1 / 16, 0, 0, 1 / 16, 1 / 16, 1 / 16, 0, 0]),
    ],
)
def test_weights_by_hand(mode: str, expected: list[float]) -> None:
    # One and three response tokens. The last sequence is masked out. It counts neither as a sequence nor with its
    # tokens.
    got = loss_weights(responses(".x", "..xxx", ".."), mode, SCALE)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert got.dtype == np.float32


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 6, 1 / 6, 1 / 6, 1 / 6]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 1 / 2, 1 / 2]),
        ("seq-mean-token-mean", [1 / 8, 1 / 8, 1 / 8, 1 / 4]),
        ("seq-mean-token-sum-norm", [1 / 16, 1 / 16, 1 / 16, 1 / 16]),
    ],
)
def test_the_sequences_of_an_episode_count_as_one(mode: str, expected: list[float]) -> None:
    # The first episode has four tokens in three sequences, one of them empty; the second has two tokens; the third is
    # masked out.
    got = loss_weights(
        responses(".x.x", "..", ".xx", ".x.x", ".."), mode, SCALE, episode_of_sequence=np.array([4, 4, 4, 5, 7])
    )
    first, second, third, fourth = expected
    np.testing.assert_allclose(got, [0, first, 0, second, 0, 0, 0, third, third, 0, fourth, 0, fourth, 0, 0], rtol=1e-6)


def weight_of(mode: str, tokens: int, own: int, rows: int) -> float:
    """Return a token's weight, from the numbers of tokens in the loss, of tokens in its episode, and of episodes with
    tokens.
    """
    match mode:
        case "token-mean":
            return 1.0 / tokens
        case "seq-mean-token-sum":
            return 1.0 / rows
        case "seq-mean-token-mean":
            return 1.0 / (own * rows)
        case _:
            return 1.0 / (rows * SCALE)


@pytest.mark.parametrize("mode", MODES)
@given(masks=st.lists(st.text(".x", min_size=1, max_size=6), min_size=1, max_size=8), drawn=st.data())
def test_token_weights_match_a_count(mode: str, masks: list[str], drawn: st.DataObject) -> None:
    """The weights agree bit for bit, also with sequence weights and with episodes of several sequences."""
    episodes = sorted(drawn.draw(st.lists(st.integers(0, 4), min_size=len(masks), max_size=len(masks))))
    factors = drawn.draw(st.lists(st.sampled_from([0.3, 1.0, 1.7]), min_size=len(masks), max_size=len(masks)))
    counts = {
        number: sum(mask.count("x") for mask, own in zip(masks, episodes, strict=True) if own == number)
        for number in episodes
    }
    total, rows = sum(counts.values()), sum(map(bool, counts.values()))
    factors = np.array(factors, np.float32).tolist()
    expected = [
        np.float32(weight_of(mode, total, counts[number], rows) * factor if letter == "x" else 0.0)
        for mask, number, factor in zip(masks, episodes, factors, strict=True)
        for letter in mask
    ]
    got = loss_weights(responses(*masks), mode, SCALE, np.array(factors, np.float32), np.array(episodes, np.int32))
    assert got.tolist() == [float(weight) for weight in expected]


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_learn_weighs_nothing(mode: str) -> None:
    assert not loss_weights(responses("..", "...."), mode).any()


def test_unknown_aggregation_mode_names_known_ones() -> None:
    with pytest.raises(ValueError, match=f"'mean'; known: {', '.join(MODES)}"):
        loss_weights(responses(".x"), "mean")


MASKS = st.lists(st.text("x.", min_size=1, max_size=8).map(lambda mask: "." + mask), min_size=1, max_size=12)


def direct(sequences: Sequences, losses: np.ndarray, mode: str) -> float:
    """Return the aggregated loss by its definition, over whole sequences, in float64."""
    bounds = itertools.pairwise(sequences.offsets)
    rows = [losses[begin:end][sequences.response_mask[begin:end]] for begin, end in bounds]
    rows = [row for row in rows if len(row)]
    if not rows:
        return 0.0
    match mode:
        case "token-mean":
            return float(np.concatenate(rows).mean())
        case "seq-mean-token-sum":
            return float(np.mean([row.sum() for row in rows]))
        case "seq-mean-token-sum-norm":
            return float(np.mean([row.sum() / SCALE for row in rows]))
        case _:
            return float(np.mean([row.mean() for row in rows]))


@given(
    masks=MASKS,
    mode=st.sampled_from(MODES),
    ranks=st.integers(1, 4),
    budget=st.integers(1, 30),
    seed=st.integers(0, 1000),
)
def test_aggregated_loss_is_equal_in_every_split(
    masks: list[str], mode: str, ranks: int, budget: int, seed: int
) -> None:
    sequences = responses(*masks)
    losses = np.random.default_rng(seed).normal(size=len(sequences.token_ids)).astype(np.float32)
    weights = loss_weights(sequences, mode, SCALE)
    whole = direct(sequences, losses.astype(np.float64), mode)
    assert float(weights.astype(np.float64) @ losses.astype(np.float64)) == pytest.approx(whole, rel=1e-5, abs=1e-6)
    parts = 0.0
    for micro_batches in split_to_budget(sequences.lengths, ranks, budget).ranks:
        for indices in micro_batches:
            part_weights = select_tokens(weights, sequences, indices).astype(np.float64)
            parts += float(part_weights @ select_tokens(losses, sequences, indices))
    assert parts == pytest.approx(whole, rel=1e-5, abs=1e-6)


def test_sequence_weights_are_factors_of_the_sequences_losses() -> None:
    got = loss_weights(responses(".x", "..xxx", ".."), "token-mean", 1.0, np.array([2, 0.5, 9], np.float32))
    np.testing.assert_allclose(got, [0, 2 / 4, 0, 0, 1 / 8, 1 / 8, 1 / 8, 0, 0])


@pytest.mark.parametrize("mode", MODES)
def test_masked_tokens_leave_numerator_and_denominator(mode: str) -> None:
    """With part of a response masked out, the loss is that of the remaining tokens alone, neither diluted nor scaled
    up.
    """
    sequences, losses = responses(".xxx", ".x"), np.array([9, 1, 2, 3, 9, 5], np.float64)
    masked = responses(".x..", ".x")
    without = responses(".x", ".x")
    kept = losses[[0, 1, 4, 5]]
    assert loss_weights(masked, mode, SCALE).astype(np.float64) @ losses == pytest.approx(
        loss_weights(without, mode, SCALE) @ kept
    )
    assert len(sequences.token_ids) == len(losses)
