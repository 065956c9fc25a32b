"""LoRA variants and Muon on every ZeRO stage, compared with plain PyTorch and PEFT in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from roll.models.export import adapter_config
from roll.models.load import add_lora, load_causal_model
from roll.models.lora_variants import adapted_layers
from roll.models.quantized import round_layers
from roll.types import TrainBatch
from tests.engines.batches import make_batch, shares, take
from tests.engines.plain import PlainUpdate, plain_updates
from tests.engines.ranks import run_ranks
from tests.engines.training import SEED, Case, Outcome, model_args, train_cases
from tests.tiers import collected, each

MUON = [Case(stage, False, optimizer="muon") for stage in range(4)] + [Case(2, True, optimizer="muon")]
ADAPTERS = [Case(stage, True, variant=name) for name in ("DoRA", "PiSSA") for stage in (0, 2, 3)]
ADAPTERS += [Case(stage, True, variant="QLoRA") for stage in (0, 1, 2)]
ADAPTERS += [Case(2, True, variant="rsLoRA"), Case(3, True, variant="LoRA+")]
RUNS = [(1, MUON[1]), (1, MUON[3])] + [(2, case) for case in MUON + ADAPTERS]
QUICK = [(2, case) for case in (MUON[2], MUON[3], Case(3, True, variant="DoRA"), Case(2, True, variant="PiSSA"))]
QUICK += [(2, Case(1, True, variant="QLoRA"))]


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


class Runs:
    """The results of all runs of the tier, which are made for one variant or optimizer at a time."""

    def __init__(self, cases: list[tuple[int, Case]], model: Path, batch: TrainBatch, folder: Path) -> None:
        self.cases, self.model, self.batch, self.folder = cases, model, batch, folder
        self.known: dict[tuple[int, Case], list[Outcome]] = {}

    def of(self, ranks: int, case: Case) -> list[Outcome]:
        """Return the outcomes of a case, by rank."""
        if (ranks, case) not in self.known:
            kind = (ranks, case.variant, case.optimizer)
            alike = [each for count, each in self.cases if (count, each.variant, each.optimizer) == kind]
            works = {whole: shares(self.batch, ranks, whole) for whole in (False, True)}
            place = self.folder / "-".join(map(str, kind))
            by_rank = run_ranks(train_cases, ranks, place, alike, self.model, works, place)
            for number, each in enumerate(alike):
                self.known[ranks, each] = [outcome[number] for outcome in by_rank]
        return self.known[ranks, case]


@pytest.fixture(scope="module")
def outcomes(batch: TrainBatch, small_model: Path, folder: Path, request: pytest.FixtureRequest) -> Runs:
    return Runs(collected(request, RUNS, QUICK), small_model, batch, folder)


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


def started_from(folder: Path, case: Case) -> dict[str, Tensor]:
    """Return the weights under the adapter: those of the file, or the same rounded to 4 bits."""
    if (kind := model_args(case).quantized_base) is None:
        return load_file(folder / "model.safetensors")
    model = load_causal_model(str(folder), model_args(case), packed=False)
    round_layers(model, kind)
    return {name: each.detach() for name, each in model.named_parameters()}


@each_run
def test_four_updates_are_plain_pytorchs(
    outcomes: Runs, plain: dict, small_model: Path, ranks: int, case: Case
) -> None:
    base = started_from(small_model, case)
    expected = plain[case.lora, case.variant, case.optimizer]
    # Muon's iteration enlarges differences of gradients, as of bf16 and float64.
    tolerance = 0.06 if case.optimizer == "muon" else 2e-3
    found = outcomes.of(ranks, case)[0]
    assert distance(found.first, expected[0].weights, base) < tolerance
    assert distance(found.second, expected[3].weights, base) < 2 * tolerance


@each_run
def test_metrics_are_plain_pytorchs(outcomes: Runs, plain: dict, ranks: int, case: Case) -> None:
    expected = plain[case.lora, case.variant, case.optimizer][0]
    if case.stage:  # DeepSpeed has no norm in fp32 without ZeRO
        norms = [found.first_result.scalars["policy/grad_norm"] for found in outcomes.of(ranks, case)]
        assert norms == pytest.approx([expected.grad_norm] * ranks, rel=1e-4)


@each_run
def test_resumed_trainer_repeats_three_updates(outcomes: Runs, ranks: int, case: Case) -> None:
    found = outcomes.of(ranks, case)[0]
    assert all(torch.equal(each, found.second[name]) for name, each in found.resumed.items())
    assert any(not torch.equal(each, found.first[name]) for name, each in found.resumed.items())


@each_run
def test_policy_without_its_adapter_scores_as_before(outcomes: Runs, ranks: int, case: Case) -> None:
    for found in outcomes.of(ranks, case):
        for before, without in zip(found.scored_before, found.scored_without_adapter, strict=True):
            assert (abs(before - without).max() < 1e-4) == case.lora


@pytest.mark.parametrize("variant", ["", "rsLoRA", "PiSSA"])
def test_engine_reads_the_scale_of_an_adapter(variant: str, small_model: Path) -> None:
    """vLLM's own reading of what a weight sync sends."""
    from vllm.lora.peft_helper import PEFTHelper

    given = model_args(Case(2, True, variant=variant))
    model = add_lora(load_causal_model(str(small_model), given), given, SEED)
    read = PEFTHelper.from_dict(json.loads(adapter_config(model)))
    assert read._validate_features() == []
    assert read.r == given.sent_rank
    assert {layer.scaling["default"] for layer in adapted_layers(model)} == {read.vllm_lora_scaling_factor}
    assert read.vllm_lora_scaling_factor == (8.0 if variant == "rsLoRA" else 4.0)
