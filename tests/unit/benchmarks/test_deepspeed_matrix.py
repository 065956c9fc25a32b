"""The DeepSpeed matrix: what its cells are, what its tables say, and some of its cells for real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import deepspeed_matrix as matrix

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "deepspeed.md"


def test_the_cells_are_all_combinations_and_none_is_twice() -> None:
    cells = matrix.cells()
    assert len(set(cells)) == len(cells) == 2 * 8 * 2 * 2 + 4 * 2


def test_the_tables_by_hand() -> None:
    found: dict[matrix.Key, float] = {
        ("sft", 2, "optimizer", "fp32", False, "adamw"): 1.23e-7,
        ("sft", 2, "optimizer", "bf16", True, "adamw"): 0.2,
        ("sft", 0, "none", "fp32", False, "lion"): 3e-3,
    }
    first, second = (table.splitlines()[2:] for table in matrix.tables_of(found).split("\n\n"))
    assert first == ["| `sft` | 2 | optimizer | 1e-07 | – | – | **2e-01** |"]
    assert second == ["| `lion` | **3e-03** | – | – | – |"]


def test_the_pages_tables_are_whole_and_within_their_tolerance() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in matrix.PLACE.read(PAGE).splitlines() if line.startswith("| `")
    ]
    assert [row[:3] for row in rows if len(row) == 7] == [
        [f"`{pipeline}`", str(stage), offload]
        for pipeline in ("rlvr", "sft")
        for stage, offloads in matrix.OFFLOADS.items()
        for offload in offloads
    ]
    assert [row[0] for row in rows if len(row) == 5] == ["`adamw`", *(f"`{optimizer}`" for optimizer in matrix.OPTIMIZERS)]
    for row in rows:
        fp32, bf16 = (row[3:5], row[5:7]) if len(row) == 7 else (row[1:], [])
        assert all(float(figure) <= matrix.TOLERANCE["fp32"] for figure in fp32), row
        assert all(float(figure) <= matrix.TOLERANCE["bf16"] for figure in bf16), row


@pytest.mark.engines
def test_some_cells_are_trained_and_not_trained_again(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{matrix.PLACE.begin}\n{matrix.PLACE.end}\n", encoding="utf-8")
    wanted = ["sft, ZeRO-3, offload all, fp32, LoRA, adamw", "sft, ZeRO-3, offload none, fp32, full"]
    command = [sys.executable, str(ROOT / "benchmarks" / "deepspeed_matrix.py"), "--folder", str(tmp_path), "--write", str(page), "--only"]
    for _ in range(2):
        subprocess.run([*command, *wanted], check=True, cwd=ROOT, env=environment(), capture_output=True, timeout=400)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sorted(line["cell"][5] for line in lines) == ["adagrad", "adamw", "adamw", "lion"]
    for line in lines:
        assert line["difference"] <= matrix.TOLERANCE["fp32"], line
        # It is a curve of a model that learns.
        assert len(line["curve"]) == len(line["plain"]) == 6
        assert line["curve"][5] < line["curve"][1] - 0.2
    written = page.read_text(encoding="utf-8")
    assert written.startswith(f"{matrix.PLACE.begin}\n| pipeline |") and written.count("`sft` | 3") == 2


def environment() -> dict[str, str]:
    """Modules come from this tree."""
    import os

    return os.environ | {"PYTHONPATH": str(ROOT)}
