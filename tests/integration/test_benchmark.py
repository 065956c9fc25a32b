"""The benchmark commands of docs/performance.md run and report their own measurements. The figures themselves are not
checked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import limits
from tests.integration.conftest import ROOT

pytestmark = pytest.mark.engines


@pytest.mark.full
def test_step_against_its_floors(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), "--steps", "3", "--repetitions", "1"]
    command += ["--json", str(tmp_path / "step.json"), "--logs", str(tmp_path / "logs")]
    places = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    finished = subprocess.run(
        command, cwd=tmp_path, env=os.environ | places, capture_output=True, text=True, timeout=limits.RUN
    )
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "step.json").read_text())
    step, floors = result["step"], result["floors"]
    parts = ("rollout", "reference", "train", "weight_sync")
    assert all(step[part] > 0 for part in parts)
    assert step["step"] >= max(step[part] for part in parts)
    assert set(floors) == {"generate", "generate_log_probs", "forward", "train", "copy"}
    assert min(floors.values()) > 0
    assert result["ratio"] == pytest.approx(step["step"] / (floors["generate"] + floors["forward"] + floors["train"]))
    assert f"{result['ratio']:.2f}" in finished.stdout
    assert result["figures"]["mismatch/logprob_abs_diff_mean/worst"] < 1e-4
    assert [line["response/length_mean"] for line in result["lines"]] == [32] * 3
    assert {path.stem for path in (tmp_path / "logs").glob("*.log")} == {
        "copy",
        "forward",
        "generate",
        "models",
        "step",
        "train",
    }
    assert (tmp_path / "logs" / "workers" / "actor_infer-0.log").exists()


@pytest.mark.full
def test_fine_tuning_against_deepspeed_by_hand(tmp_path: Path) -> None:
    work = [
        "--rows",
        "1",
        "--row-tokens",
        "64",
        "--steps",
        "4",
        "--repetitions",
        "1",
        "--stage",
        "3",
        "--lora-rank",
        "8",
    ]
    command = [sys.executable, str(ROOT / "benchmarks" / "sft.py"), *work, "--json", str(tmp_path / "sft.json")]
    places = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    finished = subprocess.run(
        command, cwd=tmp_path, env=os.environ | places, capture_output=True, text=True, timeout=limits.RUN
    )
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "sft.json").read_text())
    assert result["tokens"] == 64
    assert result["ratio"] == pytest.approx(result["seconds"]["step"] / result["seconds"]["deepspeed"])
    assert f"{result['ratio']:.3f}" in finished.stdout
    # A new adapter has no effect, whatever its seed, so roll and DeepSpeed both start with the model's own loss on the
    # same tokens.
    assert result["lines"][0]["sft/loss"] == pytest.approx(result["floors"]["sft_deepspeed_loss"][0], abs=1e-5)
    assert result["loss_difference"]["deepspeed"] < 1e-3
    assert result["work"]["checkpointed"] == 4, "on the CPU `auto` is all layers"


@pytest.mark.full
def test_rollouts_with_long_tailed_lengths(tmp_path: Path) -> None:
    work = [
        "--prompts",
        "8",
        "--samples",
        "4",
        "--steps",
        "4",
        "--max-num-seqs",
        "16",
        "--lora-rank",
        "0",
        "--stage",
        "1",
    ]
    work += ["--variants", "saturated,synchronous,asynchronous", "--repetitions", "2", "rewards.benchmark.world_size=1"]
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "longtail.py"),
        *work,
        "--json",
        str(tmp_path / "longtail.json"),
    ]
    command += ["--logs", str(tmp_path / "logs")]
    places = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    finished = subprocess.run(
        command, cwd=tmp_path, env=os.environ | places, capture_output=True, text=True, timeout=limits.RUN
    )
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "longtail.json").read_text())
    saturated, variants = result["saturated"], result["variants"]
    assert list(variants) == ["synchronous", "asynchronous"]
    assert len(saturated["stretches"]["seconds"]) == 2 and saturated["tokens_per_second"] > 0
    for name, variant in variants.items():
        lengths = [line["response/length_mean"] for line in variant["lines"]]
        # The mean of 128 responses has a standard deviation of at most 16 / sqrt(128), 1.4 tokens.
        assert len(lengths) == 4
        assert sum(lengths) / 4 == pytest.approx(result["expected"]["length"], abs=6)
        assert all(line["response/truncated_fraction"] < 0.25 for line in variant["lines"])
        assert f"{variant['figures']['step']:.3f}" in finished.stdout, name
    assert variants["synchronous"]["figures"]["staleness_most"] == 0
    ahead = variants["asynchronous"]
    assert ahead["figures"]["staleness_most"] == 1
    assert f"{ahead['ratios']['slower_side']:.2f} (target: 1.1)" in finished.stdout
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"models.log", *variants, "saturated"}


@pytest.mark.full
def test_the_trainer_alone(tmp_path: Path) -> None:
    work = [
        "--sequences",
        "2",
        "--prompt-tokens",
        "4",
        "--response-tokens",
        "12",
        "--tokens",
        "16",
        "--repetitions",
        "1",
    ]
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "train.py"),
        "--model",
        "tiny",
        *work,
        "--json",
        str(tmp_path / "train.json"),
    ]
    places = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    finished = subprocess.run(
        command, cwd=tmp_path, env=os.environ | places, capture_output=True, text=True, timeout=limits.RUN
    )
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "train.json").read_text())
    parameters = parameters_of_tiny()
    for part, operations in (("forward", 2), ("train", 6)):
        assert result["tokens_per_second"][part] == pytest.approx(2 * 16 / result["seconds"][part])
        assert result["mfu"][part] * 790e12 == pytest.approx(
            operations * parameters * result["tokens_per_second"][part]
        )
        assert len(result["seconds"]["all"][part]) == 4


def parameters_of_tiny() -> int:
    """Return the number of parameters of the model `tiny`."""
    from benchmarks.models import build_model

    return sum(parameter.numel() for parameter in build_model("tiny", 0).parameters())
