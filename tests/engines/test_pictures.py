"""Models that see pictures, trained with DeepSpeed: packed sequences are transformers' padded rows, and the updates are
AdamW's, also if only one of two ranks has pictures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from examples.tiny.make_seeing_model import FAMILIES, write_seeing_model
from roll.data import packing
from roll.models.load import load_seeing_policy
from roll.models.packed import PackedPolicy, packed_inputs
from roll.models.pictures import PROJECTORS
from roll.models.vision_names import is_of_vision
from roll.types import TrainBatch
from tests.engines.ranks import run_ranks
from tests.engines.seeing import (
    ON_ONE_RANK,
    SeeingCase,
    Seen,
    batch_of,
    padded_log_probs,
    plain_likelihood,
    plain_model,
    plain_updates,
    shares,
    updated,
)
from tests.tiers import collected, each

CASES = [
    *(SeeingCase(family, stage) for family in FAMILIES for stage in (0, 2, 3)),
    *(SeeingCase("qwen3_vl", stage, frozen="tower") for stage in (2, 3)),
    *(SeeingCase("smolvlm", stage, frozen="all") for stage in (0, 3)),
    *(SeeingCase("qwen2_5_vl", stage, lora=True) for stage in (2, 3)),
    *(SeeingCase(family, 3, lora=True) for family in ("qwen3_5", "gemma3")),
    SeeingCase("qwen3_5", 2, frozen="tower"),
    *(SeeingCase(family, 3, checkpointing="none") for family in FAMILIES),
    SeeingCase("qwen2_5_vl", 3, frozen="tower", checkpointing="attention"),
    SeeingCase("gemma3", 2, frozen="tower", checkpointing="attention"),
]
QUICK = [
    SeeingCase("qwen2_5_vl", 3),
    SeeingCase("qwen3_vl", 3, frozen="tower"),
    SeeingCase("smolvlm", 2),
    SeeingCase("qwen2_5_vl", 3, lora=True),
]
each_case = each("case", CASES, QUICK, ids=lambda case: case.name)
Outcomes = dict[SeeingCase, list[Seen]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp("seeing") / family for family in FAMILIES}
    for family, folder in folders.items():
        write_seeing_model(folder, family, seed=0, tied=family == "qwen3_vl")
    return folders


@pytest.fixture(scope="module")
def tokens(models: dict[str, Path]) -> dict[str, int]:
    return {family: AutoConfig.from_pretrained(folder).image_token_id for family, folder in models.items()}


@pytest.fixture(scope="module")
def batches(tokens: dict[str, int]) -> dict[str, TrainBatch]:
    return {family: batch_of(family, token) for family, token in tokens.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def outcomes(
    models: dict[str, Path], batches: dict[str, TrainBatch], folder: Path, request: pytest.FixtureRequest
) -> Outcomes:
    """Return the results of all cases of the tier on two ranks, of which only the first has pictures."""
    cases = collected(request, CASES, QUICK)
    work = {SeeingCase(family, 0).batch: shares(batch, ON_ONE_RANK) for family, batch in batches.items()}
    by_rank = run_ranks(updated, 2, folder, cases, models, work, folder)
    return {case: [seen[number] for seen in by_rank] for number, case in enumerate(cases)}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys() and got
    for name, tensor in got.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


ROWS = {"mixed": [0, 1, 2, 3], "none": [1], "one": [0], "three": [2], "reordered": [3, 1, 0]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", list(ROWS.values()), ids=list(ROWS))
def test_packed_sequences_are_transformers_padded_rows(
    family: str, rows: list[int], models: dict[str, Path], batches: dict[str, TrainBatch], tokens: dict[str, int]
) -> None:
    case = SeeingCase(family, 0)
    plain, policy = plain_model(models[family], case), load_seeing_policy(str(models[family]), case.model_args, 0)
    assert isinstance(policy, PackedPolicy)
    sequences = packing.select(batches[family].sequences, rows)
    expected = padded_log_probs(plain, sequences, family, tokens[family])
    log_probs, _ = policy.eval()(packed_inputs(sequences, "cpu"))
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-5)
    expected.mean().backward()
    log_probs.mean().backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    close = 5e-6 if family == "qwen3_5" else 1e-6  # transformers' delta rule computes in fp32 in any model
    seen = 0.0
    for name, parameter in policy.causal.named_parameters():
        own, other = parameter.grad, gradients[name]
        own = torch.zeros_like(parameter) if own is None else own
        other = torch.zeros_like(parameter).double() if other is None else other
        torch.testing.assert_close(own.double(), other, rtol=1e-4, atol=close, msg=lambda text, n=name: f"{n}: {text}")
        seen += float(own.abs().sum()) if is_of_vision(name) else 0.0
    assert (seen > 0) == (rows != [1])


@each_case
def test_updates_are_adamws_with_pictures_on_one_rank(
    case: SeeingCase,
    outcomes: Outcomes,
    models: dict[str, Path],
    batches: dict[str, TrainBatch],
    tokens: dict[str, int],
) -> None:
    loss_of = plain_likelihood(batches[case.family], case.family, tokens[case.family])
    expected = plain_updates(plain_model(models[case.family], case), loss_of)
    own = outcomes[case][0]
    assert_close(own.first, expected[0], 1e-5)
    assert_close(own.second, expected[1], 3e-5)
    begun: Any = AutoModelForImageTextToText.from_pretrained(models[case.family], dtype=torch.float32)
    start = {name: parameter.detach() for name, parameter in begun.named_parameters()}
    moved = {name: float((own.second[name] - start[name]).abs().max()) for name in own.second}
    for name, distance in moved.items():
        stays = case.lora or case.frozen == "all" or (case.frozen == "tower" and not PROJECTORS.search(name))
        assert (distance == 0) if is_of_vision(name) and stays else distance > 0 or case.lora, name
    assert max(moved.values()) > 1e-3


@each_case
def test_resumed_update_is_the_same(case: SeeingCase, outcomes: Outcomes) -> None:
    assert_close(outcomes[case][0].resumed, outcomes[case][0].second, 0.0)


@each_case
def test_export_is_a_model_of_transformers(
    case: SeeingCase, outcomes: Outcomes, folder: Path, models: dict[str, Path]
) -> None:
    exported = folder / case.name / "export"
    assert AutoTokenizer.from_pretrained(exported).chat_template
    given, own = (AutoImageProcessor.from_pretrained(each, backend="pil") for each in (models[case.family], exported))
    assert own.to_dict() == given.to_dict()
    if case.lora:
        from peft import PeftModel

        base: Any = AutoModelForImageTextToText.from_pretrained(models[case.family], dtype=torch.float32)
        loaded: Any = PeftModel.from_pretrained(base, exported).merge_and_unload()
    else:
        kind: Any = AutoModelForImageTextToText
        loaded, found = kind.from_pretrained(exported, dtype=torch.float32, output_loading_info=True)
        assert not found["missing_keys"] and not found["unexpected_keys"]
    assert_close({name: each.detach() for name, each in loaded.named_parameters()}, outcomes[case][0].second, 1e-6)
