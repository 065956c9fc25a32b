"""The benchmark of the memory of LoRA variants: its variants, the plan's figures and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lora_memory import HEAD, VARIANTS, Figures, Training, planned, role_of, row, work_options
from benchmarks.models import build_config
from benchmarks.train import work
from roll.config.derived.model_shape import ModelShape, read_shape


@pytest.fixture
def shape(tmp_path: Path) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(build_config("1.5b").to_dict()))
    found = read_shape(tmp_path / "config.json")
    assert found
    return found


def training(device: str, **more: int) -> Training:
    return Training("model", device, "bf16", 16, 2, more.get("tokens", 16384), 3, "auto")


def test_plan_has_the_states_of_each_variant(shape: ModelShape) -> None:
    plans = {name: planned(role_of(training("cuda"), name), shape) for name in VARIANTS}
    assert plans["LoRA"] == plans["rsLoRA"] == plans["LoRA+"]
    assert plans["QLoRA, double"]["weights"] < plans["QLoRA"]["weights"] < 0.45 * plans["LoRA"]["weights"]
    assert plans["PiSSA"]["buffers"] > plans["LoRA"]["buffers"]
    assert plans["DoRA"]["activations"] > plans["LoRA"]["activations"]


def test_rows_fill_the_micro_batches(shape: ModelShape) -> None:
    sequences, micro_batches = work(work_options(training("cpu", tokens=1024)), shape.vocab_size)
    assert len(sequences.token_ids) == 4 * 1024
    assert [len(each.batch.sequences.token_ids) for each in micro_batches] == [1024] * 4


def test_row_has_a_cell_for_each_column() -> None:
    on_gpu = Figures(100.0, [1.0], {"weights": 1 << 30, "activations": 1 << 29, "head": 0}, 1 << 30, ratio=0.667)
    for figures in (on_gpu, Figures(100.0, [1.0], {})):
        assert row("LoRA", figures).count("|") == HEAD[0].count("|") == HEAD[1].count("|")
    assert "| 1.50 | 1.00 | 0.667 |" in row("LoRA", on_gpu)
