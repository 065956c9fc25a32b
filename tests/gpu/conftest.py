"""Helpers for runs on GPUs: small models with random weights, and the pipeline in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import models
from tests import limits

ROOT = Path(__file__).parents[2]
PROMPTS, PROMPT_TOKENS = 64, 32


@dataclass(frozen=True)
class Runs:
    """A folder that is the working directory of runs."""

    folder: Path

    def run(self, name: str, experiment: tuple[str, ...], overrides: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run the pipeline with the output folder `name`. Return the metrics of its steps, including step 0."""
        keys = [f"{key}={value}" for key, value in {"output_dir": name, **overrides}.items()]
        places = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
        command = [sys.executable, "-m", "roll.pipeline", *experiment, *keys]
        finished = subprocess.run(
            command, cwd=self.folder, env=os.environ | places, capture_output=True, text=True, timeout=limits.RUN
        )
        assert finished.returncode == 0, f"{finished.stdout[-4000:]}\n{finished.stderr[-4000:]}"
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the folder of all runs of a test session."""
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def models_by_dtype(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of a small model with prompts for each dtype, `bf16` and `fp32`."""
    folder = tmp_path_factory.mktemp("models")
    for short, dtype in (("bf16", "bfloat16"), ("fp32", "float32")):
        models.write(folder / short, "tiny", PROMPTS, PROMPT_TOKENS, dtype=dtype)
    return {"bf16": folder / "bf16", "fp32": folder / "fp32"}


def need_devices(count: int) -> None:
    """Skip the test if there are fewer than `count` GPUs."""
    import torch

    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, but torch can use only {torch.cuda.device_count()}")


def write_qwen(folder: Path, **shape: Any) -> Path:
    """Write a Qwen2 with random weights, tied embeddings, a vocabulary of 2,048 and a byte tokenizer. Return its
    folder.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from examples.tiny.make_model import build_tokenizer

    config = Qwen2Config(vocab_size=2048, max_position_embeddings=1024, tie_word_embeddings=True, **shape)
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
