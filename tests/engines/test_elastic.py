"""An exported checkpoint equals the trained policy, and a run that resumes on another number of ranks continues the
same training.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll.export.__main__ import main
from roll.models.load import DTYPES
from roll.models.quantized import round_layers
from roll.runs.checkpoint.manifest import LOOP_FILE, LoopState, seal
from roll.runs.checkpoint.store import CheckpointStore
from roll.training.actor_train import merge
from roll.types import TrainBatch
from tests import limits
from tests.engines.elastic import Trained, checkpoint_of, load_and_train, train_and_save
from tests.engines.ranks import run_ranks
from tests.engines.test_train import assert_close, batch, shares  # noqa: F401  (the fixture)
from tests.engines.training import VARIANTS, Case

pytestmark = pytest.mark.full

# A model that is loaded in the same process after one with ZeRO-3 would be sharded, too.
CASES = [Case(1, False), Case(2, True), Case(2, True, variant="QLoRA"), Case(1, True, dtype="bf16", variant="QLoRA")]
CASES += [Case(3, False), Case(3, True, dtype="bf16")]
TOLERANCE = 2e-5
"""Tolerance of losses and fp32 weights after three updates: the order of summation depends on the number of ranks."""


@dataclass(frozen=True)
class Worlds:
    """Results of training without interruption and of resuming. Key: the original number of ranks. Value: by rank, then
    by case.
    """

    folder: Path
    whole: dict[int, list[list[Trained]]]
    resumed: dict[int, list[list[tuple[Trained, str]]]]


def identify(value: object) -> str | None:
    return value.name if isinstance(value, Case) else None


def config_of(case: Case, model: Path) -> str:
    """Return the text of a `config.yaml` for a run of this case."""
    adapter = {"lora_target": "all-linear", "lora_rank": 4, "lora_alpha": 16.0} if case.lora else {}
    adapter |= VARIANTS[case.variant]
    role = {
        "model_args": {"dtype": case.dtype, **adapter},
        "data_args": {"file_name": "none.jsonl", "prompt": "prompt", "response": "response"},
        "strategy_args": {
            "strategy_name": "deepspeed_train",
            "strategy_config": {"zero_optimization": {"stage": case.stage}},
        },
    }
    run = {
        "pipeline": "sft",
        "exp_name": "run",
        "output_dir": "run",
        "pretrain": str(model),
        "max_steps": 1,
        "sft_train": role,
    }
    return yaml.safe_dump(run)


@pytest.fixture(scope="module")
def worlds(batch: TrainBatch, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Worlds:  # noqa: F811
    """Train on two ranks and resume on one, and the reverse. This starts four groups of processes."""
    folder = tmp_path_factory.mktemp("elastic")
    works = {ranks: shares(batch, ranks, whole=False) for ranks in (1, 2)}
    whole, resumed = {}, {}
    for ranks in (2, 1):
        place = folder / str(ranks)
        whole[ranks] = run_ranks(train_and_save, ranks, place, CASES, small_model, works[ranks], place)
        for case in CASES:
            checkpoint = checkpoint_of(place, case)
            shutil.copytree(
                checkpoint / "deepspeed", checkpoint / "critic" / "deepspeed"
            )  # a critic's states have their own folder
            LoopState(1, 1, {"position": 3}, {}, 1.0).write(checkpoint)
            seal(checkpoint, 1, 1, [LOOP_FILE])
            (place / case.name / "config.yaml").write_text(config_of(case, small_model))
            assert main([str(place / case.name), str(place / case.name / "universal"), "--format", "universal"]) == 0
        resumed[ranks] = run_ranks(load_and_train, 3 - ranks, place, CASES, small_model, works[3 - ranks], place)
    return Worlds(folder, whole, resumed)


each_way = pytest.mark.parametrize("ranks", [2, 1], ids=["2_ranks_to_1", "1_rank_to_2"])
each_case = pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])


@each_way
@each_case
def test_the_curve_goes_on_where_it_was(worlds: Worlds, ranks: int, number: int) -> None:
    whole = [rank[number] for rank in worlds.whole[ranks]]
    resumed = [rank[number][0] for rank in worlds.resumed[ranks]]
    tolerance = TOLERANCE if CASES[number].dtype == "fp32" else 2e-3
    for update in range(3):
        expected, found = (merge([rank.curve[update] for rank in ranks_]) for ranks_ in (whole, resumed))
        assert found["policy/loss"] == pytest.approx(expected["policy/loss"], abs=tolerance)
        assert found["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=50 * tolerance)
        assert found["policy/lr"] == expected["policy/lr"]
    assert_close(resumed[0].saved, whole[0].saved, 0.0)
    assert_close(resumed[0].weights, whole[0].weights, tolerance if CASES[number].dtype == "fp32" else 2e-2)
    losses = [merge([rank.curve[update] for rank in whole])["policy/loss"] for update in range(3)]
    assert max(losses) - min(losses) > 10 * tolerance, "the losses must change for the comparison to mean anything"


@each_way
@each_case
def test_without_conversion_it_says_what_to_do(worlds: Worlds, ranks: int, number: int) -> None:
    for rank in worlds.resumed[ranks]:
        refusal = rank[number][1]
        assert f"by {ranks} ranks, " in refusal and f"there are {3 - ranks}" in refusal
        assert "--format universal" in refusal and "resume_from_checkpoint=OUT" in refusal


def stored(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the folder's safetensors files."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "number", [number for number, case in enumerate(CASES) if not case.lora], ids=lambda number: CASES[number].name
)
def test_deepspeed_script_reads_a_checkpoint(worlds: Worlds, tmp_path: Path, number: int) -> None:
    checkpoint = checkpoint_of(worlds.folder / "2", CASES[number])
    words = [sys.executable, "zero_to_fp32.py", ".", str(tmp_path / "out")]
    done = subprocess.run(words, cwd=checkpoint, capture_output=True, text=True, timeout=limits.PROCESS, check=False)
    assert done.returncode == 0, done.stderr
    written = torch.load(tmp_path / "out" / "pytorch_model.bin")
    trained = {name: tensor.float() for name, tensor in worlds.whole[2][0][number].saved.items()}
    assert_close({name.removeprefix("model."): tensor for name, tensor in written.items()}, trained, 0.0)


@each_way
@each_case
def test_exported_weights_are_the_trainers(
    worlds: Worlds, small_model: Path, tmp_path: Path, ranks: int, number: int
) -> None:
    case, trained = CASES[number], worlds.whole[ranks][0][number]
    run = worlds.folder / str(ranks) / case.name
    whole = tmp_path / "whole"
    assert main([str(run), str(whole), "--format", "merged" if case.lora else "hf"]) == 0
    assert_close(stored(whole), trained.saved, 0.0)
    loaded = AutoModelForCausalLM.from_pretrained(whole)
    assert loaded.dtype == (torch.float32 if case.dtype == "fp32" else torch.bfloat16)
    assert main([str(checkpoint_of(run.parent, case)), str(tmp_path / "fp32"), "--format", "fp32"]) == 0
    exact = stored(tmp_path / "fp32")
    assert {tensor.dtype for tensor in exact.values()} == {torch.float32}
    if case.lora:
        assert main([str(run), str(tmp_path / "adapter")]) == 0
        assert_close(stored(tmp_path / "adapter"), trained.adapter, 0.0)
        base: Any = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
        if kind := VARIANTS[case.variant].get("quantized_base"):  # which rounds the weights in the trainer's precision
            base.to(dtype=DTYPES[case.dtype])
            round_layers(base, kind)
            base.float()
        merged = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
        difference = (
            (merged(torch.arange(40, 56)[None]).logits - loaded.float()(torch.arange(40, 56)[None]).logits).abs().max()
        )
        assert difference < (1e-4 if case.dtype == "fp32" else 0.1)
    else:
        assert_close({name: tensor.to(trained.saved[name].dtype) for name, tensor in exact.items()}, trained.saved, 0.0)


def test_run_resumes_from_universal_checkpoint(worlds: Worlds, tmp_path: Path) -> None:
    folder = worlds.folder / "2" / CASES[0].name / "universal"
    assert CheckpointStore(tmp_path, 1).resolve(str(folder)) == folder
    assert LoopState.read(folder).sampler == {"position": 3}
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert {Path(name).parts[0] for name in files} == {"deepspeed_universal", "critic", "loop.json"}
    assert {Path(name).parts[1] for name in files if name.startswith("critic")} == {"deepspeed_universal"}


def test_what_cannot_be_exported_is_refused(worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = worlds.folder / "2" / CASES[0].name
    assert main([str(run), str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main([str(run), str(tmp_path / "out"), "--format", "peft"]) == 2
    assert "trained all weights" in capsys.readouterr().err
    assert main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert f"'{tmp_path}' is neither" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
