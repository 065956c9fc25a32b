"""The command of the DeepSpeed matrix, on some of its cells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import deepspeed_matrix as matrix
from benchmarks.deepspeed_table import PIPELINES, Cell
from tests import limits
from tests.integration.conftest import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.full]


def test_some_cells_are_trained_and_not_trained_again(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    place = matrix.PLACES["cpu"]
    page.write_text(f"{place.begin}\n{place.end}\n", encoding="utf-8")
    wanted = [f"{name}, ZeRO-3, offload all, fp32, LoRA" for name in PIPELINES] + [
        "ZeRO-3, offload none, fp32, full, lion"
    ]
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "deepspeed_matrix.py"),
        "--folder",
        str(tmp_path),
        "--write",
        str(page),
        "--only",
    ]
    for _ in range(2):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(
            [*command, *wanted], check=True, cwd=ROOT, env=environment, capture_output=True, timeout=limits.RUN
        )
    lines = [json.loads(line) for line in (tmp_path / "cpu.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sorted(line["cell"][0] for line in lines) == sorted([*PIPELINES, "sft"]), "each cell is trained once"
    for line in lines:
        assert line["difference"] <= Cell(*line["cell"]).tolerance == 1e-5, line
        # The loss falls. Two batches alternate, so updates 0 and 4 have the same batch; the learning rate of update 0
        # is 0.
        assert len(line["curve"]) == len(line["plain"]) == 6
        assert line["curve"][4] < line["curve"][0] - 0.1, line
    written = page.read_text(encoding="utf-8")
    assert written.startswith(f"{place.begin}\n| pipeline |") and written.count("| 3 | all |") == len(PIPELINES)
