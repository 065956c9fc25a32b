"""Router replay in training: every arrangement of ranks trains like plain PyTorch whose choice of experts is forced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.types import Routes, TrainBatch
from tests.engines.batches import make_batch, take
from tests.engines.plain import PlainUpdate, plain_updates
from tests.engines.ranks import run_ranks
from tests.engines.test_expert_parallel import assert_near, replicas, works
from tests.engines.training import Case, Outcome, train_cases

pytestmark = pytest.mark.full

RANKS, LAYERS, EXPERTS, CHOSEN = 2, 2, 8, 2
CASES = [
    Case(3, False, replays=True),
    Case(2, True, checkpointing="attention", replays=True),
    Case(2, False, checkpointing=0, expert_parallel=2, replays=True),
    Case(1, False, sequence_parallel=2, replays=True),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
UPDATES = ([0, 1, 2, 3], [4, 5, 6, 7]) * 2


def routed(batch: TrainBatch) -> TrainBatch:
    """Return the batch with routes of different experts, and without any for a fifth of the tokens."""
    generator = np.random.default_rng(5)
    tokens = len(batch.sequences.token_ids)
    order = generator.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :CHOSEN].astype(np.int16)
    order[generator.random(tokens) < 0.2] = -1
    return replace(batch, sequences=replace(batch.sequences, routes=order))


def in_order(batches: list[TrainBatch]) -> Iterator[Routes]:
    """Yield the routes [T, k] of each layer of each sequence, in the order of plain forward passes."""
    for batch in batches:
        offsets, routes = batch.sequences.offsets, batch.sequences.routes
        assert routes is not None
        for begin, end in zip(offsets[:-1], offsets[1:], strict=True):
            yield from routes[begin:end].swapaxes(0, 1)


@contextmanager
def forced(given: Iterator[Routes]) -> Iterator[None]:
    """Make torch's `topk` return these routes, one after another."""
    topk = torch.topk

    def choose(values: Tensor, k: int, dim: int = -1, **more: Any) -> Any:
        routes = torch.from_numpy(next(given)).long()
        chosen = torch.where((routes < 0).any(-1, keepdim=True), topk(values, k, dim=dim, **more).indices, routes)
        return values.gather(-1, chosen), chosen

    with mock.patch.object(torch, "topk", choose):
        yield
    assert next(given, None) is None


@pytest.fixture(scope="module")
def batch(expert_model: Path) -> TrainBatch:
    return routed(make_batch(expert_model))


@pytest.fixture(scope="module")
def outcomes(batch: TrainBatch, expert_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    """Return the results of each case's first rank."""
    folder, out = tmp_path_factory.mktemp("replayed"), dict[Case, Outcome]()
    for count in {replicas(RANKS, case) for case in CASES}:
        cases = [case for case in CASES if replicas(RANKS, case) == count]
        work = {False: works(batch, RANKS, cases[0])}
        by_rank = run_ranks(train_cases, RANKS, folder / str(count), cases, expert_model, work, folder / str(count))
        out |= dict(zip(cases, by_rank[0], strict=True))
    return out


@pytest.fixture(scope="module")
def plain(batch: TrainBatch, expert_model: Path) -> dict[bool, list[PlainUpdate]]:
    """Return four updates in plain PyTorch with forced routes, in one process in float64; with LoRA under True."""
    parts, out = [take(batch, indices) for indices in UPDATES], dict[bool, list[PlainUpdate]]()
    for lora in (False, True):
        with forced(in_order(parts)):
            out[lora] = plain_updates(expert_model, lora, parts)
    return out


@each_case
def test_replayed_updates_are_of_forced_routes(
    outcomes: dict[Case, Outcome], plain: dict[bool, list[PlainUpdate]], case: Case
) -> None:
    assert_near(outcomes[case].first, plain[case.lora][0].weights)
    assert_near(outcomes[case].second, plain[case.lora][3].weights)
    norm = outcomes[case].first_result.scalars["policy/grad_norm"]
    assert norm == pytest.approx(plain[case.lora][0].grad_norm, rel=1e-4)


def test_the_routes_matter(batch: TrainBatch, expert_model: Path, plain: dict[bool, list[PlainUpdate]]) -> None:
    [own] = plain_updates(expert_model, False, [take(batch, UPDATES[0])])
    assert own.grad_norm != pytest.approx(plain[False][0].grad_norm, rel=0.01)
