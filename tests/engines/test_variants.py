"""LoRA variants and Muon on every ZeRO stage, compared with plain PyTorch and PEFT in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from roll.types import TrainBatch
from tests.engines.batches import make_batch, shares, take
from tests.engines.plain import PlainUpdate, plain_updates
from tests.engines.ranks import run_ranks
from tests.engines.training import Case, Outcome, train_cases
from tests.tiers import collected, each

MUON = [Case(stage, False, optimizer="muon") for stage in range(4)] + [Case(2, True, optimizer="muon")]
ADAPTERS = [Case(stage, True, variant=name) for name in ("DoRA", "PiSSA") for stage in (0, 2, 3)]
ADAPTERS += [Case(2, True, variant="rsLoRA"), Case(3, True, variant="LoRA+")]
COMPILED = [Case(3, True, variant=name, compiled=True) for name in ("DoRA", "PiSSA")]
RUNS = [(1, MUON[1]), (1, MUON[3])] + [(2, case) for case in MUON + ADAPTERS + COMPILED]
QUICK = [(2, case) for case in (MUON[2], MUON[3], Case(3, True, variant="DoRA"), Case(2, True, variant="PiSSA"))]
Runs = dict[tuple[int, Case], list[Outcome]]


def identify(value: object) -> str | None:
    """Return the name of a parameter in pytest's report."""
    return value.name if isinstance(value, Case) else f"{value}_ranks" if isinstance(value, int) else None


each_run = each("ranks,case", RUNS, QUICK, identify)


@pytest.fixture(scope="module")
def batch(small_model: Path) -> TrainBatch:
    return make_batch(small_model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("variants")


@pytest.fixture(scope="module")
def outcomes(batch: TrainBatch, small_model: Path, folder: Path, request: pytest.FixtureRequest) -> Runs:
    """Return the results of all runs of the tier, by rank."""
    out: Runs = {}
    for ranks in (1, 2):
        if cases := [case for count, case in collected(request, RUNS, QUICK) if count == ranks]:
            works = {whole: shares(batch, ranks, whole) for whole in (False, True)}
            by_rank = run_ranks(train_cases, ranks, folder / str(ranks), cases, small_model, works, folder / str(ranks))
            out |= {(ranks, case): [outcome[number] for outcome in by_rank] for number, case in enumerate(cases)}
    return out


@pytest.fixture(scope="module")
def plain(batch: TrainBatch, small_model: Path) -> dict[tuple[bool, str, str], list[PlainUpdate]]:
    """Return the results of the four updates. Key: whether LoRA is used, its variant, and the optimizer."""
    one, two = take(batch, [0, 1, 2, 3]), take(batch, [4, 5, 6, 7])
    kinds = {(case.lora, case.variant, case.optimizer) for _, case in RUNS}
    return {kind: plain_updates(small_model, kind[0], [one, two, one, two], *kind[1:]) for kind in kinds}


def distance(got: dict[str, Tensor], other: dict[str, Tensor], base: dict[str, Tensor]) -> float:
    """Return the largest difference of a tensor, relative to the other's way from `base`."""
    assert got.keys() == other.keys() and got
    ways = {name: torch.linalg.vector_norm(each.float() - base[name].float()) for name, each in other.items()}
    return max(
        float(torch.linalg.vector_norm(got[name].float() - other[name].float()) / ways[name])
        for name in got
        if ways[name] > 1e-3
    )


@each_run
def test_four_updates_are_plain_pytorchs(
    outcomes: Runs, plain: dict, small_model: Path, ranks: int, case: Case
) -> None:
    base = load_file(small_model / "model.safetensors")
    expected = plain[case.lora, case.variant, case.optimizer]
    # torch's Muon iterates in bf16, the formulas in float64.
    tolerance = 0.06 if case.optimizer == "muon" else 2e-3
    found = outcomes[ranks, case][0]
    assert distance(found.first, expected[0].weights, base) < tolerance
    assert distance(found.second, expected[3].weights, base) < tolerance


@each_run
def test_metrics_are_plain_pytorchs(outcomes: Runs, plain: dict, ranks: int, case: Case) -> None:
    expected = plain[case.lora, case.variant, case.optimizer][0]
    if case.stage:  # DeepSpeed has no norm in fp32 without ZeRO
        norms = [found.first_result.scalars["policy/grad_norm"] for found in outcomes[ranks, case]]
        assert norms == pytest.approx([expected.grad_norm] * ranks, rel=1e-4)


@each_run
def test_resumed_trainer_repeats_three_updates(outcomes: Runs, ranks: int, case: Case) -> None:
    found = outcomes[ranks, case][0]
    assert all(torch.equal(each, found.second[name]) for name, each in found.resumed.items())
    assert any(not torch.equal(each, found.first[name]) for name, each in found.resumed.items())


@each_run
def test_policy_without_its_adapter_scores_as_before(outcomes: Runs, ranks: int, case: Case) -> None:
    for found in outcomes[ranks, case]:
        for before, without in zip(found.scored_before, found.scored_without_adapter, strict=True):
            assert (abs(before - without).max() < 1e-4) == case.lora
