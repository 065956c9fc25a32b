"""Preferences and reward models on pairs whose prompts show pictures, trained with DeepSpeed on two ranks.

Only the first rank has pictures. Losses and updates are those of transformers' padded rows in float64 and the written
formulas.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, AutoModelForSequenceClassification

from examples.tiny.make_seeing_model import FAMILIES, PAD_ID, write_seeing_model
from roll.backend import Rank
from roll.config.derived.model_shape import BOTH_WAYS
from roll.data import packing
from roll.data.examples import Example, ExampleSequence
from roll.engines.hf.settings import HfRewardSettings, HfScoreSettings
from roll.engines.hf.strategy import HfScore
from roll.models.load import add_lora
from roll.models.packed import PackedPolicy, packed_inputs
from roll.models.pictures import freeze_vision
from roll.models.value import load_scores
from roll.models.vision_names import is_of_vision
from roll.runs.offline.batches import Ask, Models, given_batch, mismatched
from roll.runs.offline.wiring import dpo_batch, kto_kl, reward_model_batch
from roll.training.actor_train import merge
from roll.types import Floats, Sequences, TrainBatch
from tests import limits
from tests.engines.ranks import run_ranks
from tests.engines.seeing import (
    BETA,
    KINDS,
    SMOOTHING,
    SeeingCase,
    Seen,
    kernel_of,
    padded_inputs,
    padded_log_probs,
    padded_pairs,
    pairs_of,
    plain_model,
    plain_updates,
    shares,
    updated,
)
from tests.engines.training import SEED
from tests.tiers import collected, each

CASES = [
    *(
        SeeingCase(family, stage, kind=kind)
        for kind in ("dpo", "reward_model")
        for family in FAMILIES
        for stage in (2, 3)
    ),
    SeeingCase("qwen3_vl", 3, frozen="tower", kind="reward_model"),
    *(SeeingCase("qwen2_5_vl", 3, lora=True, kind=kind) for kind in ("dpo", "reward_model")),
]
QUICK = [
    SeeingCase("qwen2_5_vl", 3, kind="dpo"),
    SeeingCase("smolvlm", 2, kind="dpo"),
    SeeingCase("qwen2_5_vl", 2, kind="reward_model"),
    SeeingCase("smolvlm", 3, kind="reward_model"),
]
EXPORTED = [case for case in CASES if case.kind == "reward_model" and case.stage == 2] + QUICK[3:]
"""Cases whose export is loaded."""
each_case = each("case", CASES, QUICK, ids=lambda case: case.name)
ON_ONE_RANK = ([[0, 1, 4, 5], [6, 7]], [[2, 3], []])
"""By rank, the sequences of each micro-batch: the pair without a picture is alone on the second rank."""
LOAD = """
import sys, torch
from transformers import AutoModelForSequenceClassification
keys = {"trust_remote_code": True} if sys.argv[3] else {}
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], dtype=torch.float32, **keys)
torch.save({name: each.detach() for name, each in model.named_parameters()}, sys.argv[2])
"""
Outcomes = dict[SeeingCase, list[Seen]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp("seeing") / family for family in FAMILIES}
    for family, folder in folders.items():
        write_seeing_model(folder, family, seed=0)
        write_seeing_model(folder.with_name("reference"), family, seed=1)
    return folders


@pytest.fixture(scope="module")
def tokens(models: dict[str, Path]) -> dict[str, int]:
    return {family: AutoConfig.from_pretrained(folder).image_token_id for family, folder in models.items()}


async def pair_batch(kind: str, examples: Sequence[Example], reference: Path) -> TrainBatch:
    """Return the batch that the pipeline makes of pairs, with the log-probs of a reference in `dpo`."""
    if kind == "reward_model":
        return (await reward_model_batch(PAD_ID, examples, Models(refuse)))[0]
    return (await dpo_batch(KINDS["dpo"][1], examples, Models(refuse, asker(reference))))[0]


def asker(folder: Path) -> Ask:
    """Return a function that computes log-probs as a reference in `hf_infer` does."""
    keys, rank = SeeingCase("", 0).model_args, Rank("reference", 0, 1, "", 0, "cpu", limits.START)
    scorer = HfScore(HfScoreSettings(str(folder), keys, PackedPolicy), rank)

    async def ask(sequences: Sequences) -> Floats:
        return scorer.log_probs([sequences], 1.0)[0]

    return ask


async def refuse(sequences: Sequences) -> Floats:
    raise AssertionError("pairs need no log-probs of the learner")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def outcomes(models: dict[str, Path], tokens: dict[str, int], folder: Path, request: pytest.FixtureRequest) -> Outcomes:
    cases, work = collected(request, CASES, QUICK), {}
    for case in cases:
        examples, reference = pairs_of(case.family, tokens[case.family]), models[case.family].with_name("reference")
        batch = asyncio.run(pair_batch(case.kind, examples, reference))
        work[case.batch] = shares(batch, ON_ONE_RANK, KINDS[case.kind][2])
    by_rank = run_ranks(updated, 2, folder, cases, models, work, folder)
    return {case: [seen[number] for seen in by_rank] for number, case in enumerate(cases)}


def plain_dpo(reference: Any, family: str, token: int) -> Callable[[Any], Tensor]:
    """Return the loss of DPO with label smoothing, as a function of the model."""
    sequences = padded_pairs(family, token)

    def sums(model: Any) -> Tensor:
        found = padded_log_probs(model, sequences, family, token)
        return torch.stack([part.sum() for part in found.split(sequences.response_lengths.tolist())])

    with torch.no_grad():
        before = sums(reference)

    def loss_of(model: Any) -> Tensor:
        ratios = sums(model) - before
        h = BETA * (ratios[0::2] - ratios[1::2])
        return (-(1 - SMOOTHING) * torch.log(torch.sigmoid(h)) - SMOOTHING * torch.log(torch.sigmoid(-h))).mean()

    return loss_of


def padded_scores(model: Any, sequences: Sequences, family: str, token: int) -> Tensor:
    """Return the score of each sequence: the head's output for the state at its last token."""
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    states = whole.base_model(**padded_inputs(sequences, family, token)).last_hidden_state
    return states[torch.arange(len(sequences)), torch.from_numpy(sequences.lengths) - 1] @ whole.score.weight[0]


def plain_bradley_terry(family: str, token: int) -> Callable[[Any], Tensor]:
    """Return the loss of Bradley-Terry with margins, as a function of the model."""
    sequences = padded_pairs(family, token)
    margins = torch.tensor([example.value for example in pairs_of(family, token)])

    def loss_of(model: Any) -> Tensor:
        scores = padded_scores(model, sequences, family, token)
        return -torch.log(torch.sigmoid(scores[0::2] - scores[1::2] - margins)).mean()

    return loss_of


def plain_scorer(folder: Path, case: SeeingCase) -> Any:
    """Return a reward model in float64 with a head of zero, and otherwise the weights of the model that it is from."""
    scorer = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32, attn_implementation=kernel_of(case.family)
    )
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    own, other = dict(scorer.named_parameters()), dict(whole.named_parameters())
    assert own.keys() - other.keys() == {"score.weight"} and other.keys() - own.keys() <= {"lm_head.weight"}
    assert all(torch.equal(own[name], other[name]) for name in own.keys() & other.keys())
    nn.init.zeros_(scorer.score.weight)
    freeze_vision(scorer, case.frozen)
    if case.lora:
        scorer = add_lora(scorer, case.model_args, SEED)
        scorer.get_base_model().score.requires_grad_(True)
    return scorer.double().eval()


def plain(case: SeeingCase, folder: Path, token: int) -> tuple[Any, Callable[[Any], Tensor]]:
    """Return the model that a case starts from, and its loss."""
    if case.kind == "reward_model":
        return plain_scorer(folder, case), plain_bradley_terry(case.family, token)
    reference = plain_model(folder.with_name("reference"), SeeingCase(case.family, 0))
    return plain_model(folder, case), plain_dpo(reference, case.family, token)


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys() and got
    for name, tensor in got.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


@each_case
def test_updates_on_pairs_are_adamws(
    case: SeeingCase, outcomes: Outcomes, models: dict[str, Path], tokens: dict[str, int]
) -> None:
    model, loss_of = plain(case, models[case.family], tokens[case.family])
    with torch.no_grad():
        loss = loss_of(model).item()
    start = {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}
    expected, own = plain_updates(model, loss_of), outcomes[case][0]
    subject = "dpo" if case.kind == "dpo" else "reward_model"
    found = merge([seen.metrics for seen in outcomes[case]])[f"{subject}/loss"]
    assert found == pytest.approx(loss, abs=1e-5) and (case.kind != "dpo" or abs(loss - np.log(2)) > 1e-2)
    assert_close(own.first, expected[0], 1e-5)
    assert_close(own.second, expected[1], 3e-5)
    assert_close(own.resumed, own.second, 0.0)
    moved = {name for name in start if name in own.second and not torch.equal(own.second[name], start[name])}
    assert any(map(is_of_vision, moved)) == (not case.lora)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "smolvlm", "gemma3"])
def test_kl_of_kto_counts_pictures_of_prompts(family: str, models: dict[str, Path], tokens: dict[str, int]) -> None:
    """Each prompt, with its pictures, is followed by the response to the next one."""
    token, given = tokens[family], [example.sequences[0] for example in pairs_of(family, tokens[family])]
    estimate = asyncio.run(
        kto_kl(
            mismatched([Example((one,), 1.0) for one in given]),
            Models(asker(models[family].with_name("reference")), asker(models[family])),
        )
    )
    rows = []
    for one, other in zip(given, [*given[1:], given[0]], strict=True):
        prompt, response = one.token_ids[~one.response_mask], other.token_ids[other.response_mask]
        ids = np.concatenate([prompt, response])
        rows.append(ExampleSequence(ids, np.arange(len(ids)) >= len(prompt), one.shown))
    padded = given_batch([Example((row,), 1.0) for row in rows]).sequences
    case = SeeingCase(family, 0)
    with torch.no_grad():
        sums = [
            padded_log_probs(plain_model(folder, case), padded, family, token).sum()
            for folder in (models[family].with_name("reference"), models[family])
        ]
    expected = float(sums[0] - sums[1]) / len(given)
    assert estimate == pytest.approx(max(0.0, expected), abs=1e-4) and abs(expected) > 1e-2
    assert estimate > 0, "the other direction would be cut off at 0"


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_scores_are_those_of_rows_alone(family: str, models: dict[str, Path], tokens: dict[str, int]) -> None:
    case = SeeingCase(family, 0, kind="reward_model")
    packed, alone = load_scores(str(models[family]), case.model_args, 0), plain_scorer(models[family], case)
    batch = asyncio.run(pair_batch(case.kind, pairs_of(family, tokens[family]), models[family]))
    weight = torch.randn(alone.score.weight.shape, generator=torch.Generator().manual_seed(0))
    packed.causal.get_parameter("score.weight").data.copy_(weight)
    alone.score.weight.data.copy_(weight)
    with torch.no_grad():
        (scores,) = packed.eval()(packed_inputs(batch.sequences, "cpu"))
        rows = [packing.select(padded_pairs(family, tokens[family]), [number]) for number in range(len(batch))]
        expected = torch.cat([padded_scores(alone, row, family, tokens[family]) for row in rows])
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("budget", [1, 200], ids=["each alone", "packed"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "smolvlm", "gemma3"])
def test_served_scores_are_those_of_rows_alone(
    family: str, budget: int, models: dict[str, Path], tokens: dict[str, int], tmp_path: Path
) -> None:
    case = SeeingCase(family, 0, kind="reward_model")
    alone = plain_scorer(models[family], case)
    nn.init.normal_(alone.score.weight, generator=torch.Generator().manual_seed(0))
    alone.float().save_pretrained(tmp_path / "model")
    alone.double()
    batch, padded = given_batch(pairs_of(family, tokens[family])), padded_pairs(family, tokens[family])
    rows = [packing.select(padded, [number]) for number in range(len(batch))]
    given = [sequence for example in pairs_of(family, tokens[family]) for sequence in example.sequences]

    async def run() -> list[float]:
        strategy = HfRewardSettings(str(tmp_path / "model"), case.model_args, budget).build(
            Rank("rewards.r", 0, 1, "", 0, "cpu", limits.START)
        )
        await strategy.start()
        found = await strategy.scores([one.token_ids for one in given], [one.shown for one in given])
        await strategy.close()
        return found

    with torch.no_grad():
        expected = torch.cat([padded_scores(alone, row, family, tokens[family]) for row in rows])
    tolerance = 4e-5 if family == "qwen3_5" else 2e-5  # scores are around 8, and the delta rule rounds more
    assert asyncio.run(run()) == pytest.approx(expected.tolist(), abs=tolerance) and float(expected.std()) > 0.1


def test_tower_sees_picture_of_pair_once(models: dict[str, Path], tokens: dict[str, int]) -> None:
    batch = given_batch(pairs_of("qwen2_5_vl", tokens["qwen2_5_vl"]))
    shown = batch.sequences.shown
    assert shown is not None and shown.counts.tolist() == [1, 1, 0, 0, 3, 3, 2, 2]
    alone = padded_pairs("qwen2_5_vl", tokens["qwen2_5_vl"]).shown
    assert alone is not None and 2 * len(shown.values) == len(alone.values)
    pictures = packed_inputs(batch.sequences, "cpu").shown
    assert pictures is not None and len(pictures.grids) == 6 and len(pictures.copies) == 12


@each("case", EXPORTED, [case for case in QUICK if case in EXPORTED], ids=lambda case: case.name)
def test_reward_model_is_exported_for_transformers(
    case: SeeingCase, outcomes: Outcomes, folder: Path, tmp_path: Path
) -> None:
    remote = "" if case.family in BOTH_WAYS else "code"  # transformers has classifiers of those
    command = [sys.executable, "-c", LOAD, str(folder / case.name / "export"), str(tmp_path / "weights"), remote]
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=limits.RUN, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_close(torch.load(tmp_path / "weights"), outcomes[case][0].second, 0.0)
    again = load_scores(str(folder / case.name / "export"), case.model_args, 0)
    assert torch.equal(again.causal.get_parameter("score.weight"), outcomes[case][0].second["score.weight"])
