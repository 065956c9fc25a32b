"""The work and the ways of `benchmarks/tensor_parallel.py`."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.tensor_parallel import Way, batch_of, ways, works

OPTIONS = {"device": "cpu", "ranks": 2, "texts": 8, "tokens": 64, "budget": 100, "updates": 3, "compiled": False}


def test_a_mixture_is_compared_by_zero_and_autoep() -> None:
    chosen = ways("cuda", 2, has_experts=True)
    assert chosen[0] == Way(3, "bf16", False)
    assert {(way.stage, way.experts) for way in chosen[1:]} == {(1, 2), (2, 2), (3, 2)}
    assert chosen[1].name == "ZeRO-3 + AutoEP 2, all weights, bf16"
    assert all(way.experts == 1 for way in ways("cuda", 4))


def test_tokens_of_a_rank_are_exact() -> None:
    first, second = works(Namespace(**OPTIONS, rank_tokens=[128, 512]), "model")
    assert (first.texts, first.budget, second.texts, second.budget) == (4, 128, 16, 512)
    assert batch_of(first, 0).sequences.lengths.tolist() == [64] * 4
    (whole,) = works(Namespace(**OPTIONS, rank_tokens=[]), "model")
    assert (whole.texts, whole.budget, whole.exact) == (8, 100, False)
