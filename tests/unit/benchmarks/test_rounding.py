"""The benchmark of rounding: its layers, drawn one at a time, compute the same as the whole model in transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import rounding
from benchmarks.models import build_config
from tests import limits


def keep_results(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    kept, original = [], getattr(rounding, name)
    monkeypatch.setattr(rounding, name, lambda *given: kept.append(original(*given)) or kept[-1])
    return kept


def test_layer_by_layer_is_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices, layers, logits, rows = (
        keep_results(monkeypatch, name) for name in ("drawn", "Qwen2DecoderLayer", "logits_of", "random_row")
    )
    config = build_config("tiny")
    found = rounding.differences("tiny", tokens=40, seed=3)

    assert isinstance(config, Qwen2Config)
    config._attn_implementation = "sdpa"
    whole = Qwen2ForCausalLM(config).float()
    whole.model.embed_tokens.weight.data, whole.lm_head.weight.data = (matrix.float() for matrix in matrices)
    for target, drawn in zip(whole.model.layers, layers, strict=True):
        target.load_state_dict(drawn.float().state_dict())
    expected = whole(rows[0]).logits[0]
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-5)
    assert found == rounding.differences("tiny", tokens=40, seed=3)
    assert all(1e-4 < difference < 5e-3 for difference in found.values()), found


@pytest.mark.full
def test_the_command_prints_each_two_of_the_ways() -> None:
    command = [sys.executable, str(Path(rounding.__file__)), "--model", "tiny", "--tokens", "16"]
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=limits.PROCESS
    ).stdout.splitlines()
    assert [line.rsplit(":", 1)[0] for line in printed] == [
        "tiny, 16 tokens, fp32 and bf16",
        "tiny, 16 tokens, fp32 and bf16, plain attention",
        "tiny, 16 tokens, bf16 and bf16, plain attention",
    ]
    assert all(0 < float(line.rsplit(":", 1)[1]) < 0.01 for line in printed)
