"""The DeepSpeed matrix: its cells, its tables, and the file of its results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import deepspeed_matrix as matrix
from benchmarks.deepspeed_table import DTYPES, OFFLOADS, PIPELINES, Cell, Said, cells, is_bad, tables_of

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "deepspeed.md"


def ran(difference: float) -> Said:
    return Said("a machine", difference)


@pytest.mark.parametrize(("device", "precisions", "others"), [("cpu", 2, 12 + 4 + 4), ("cuda", 1, 4 + 6 + 4 + 6)])
def test_matrix_cells_are_all_combinations_once(device: str, precisions: int, others: int) -> None:
    every = cells(device)
    assert len(set(every)) == len(every) == 6 * 8 * precisions * 2 + others
    assert len({cell.name for cell in every}) == len(every), "--only selects cells by name"


def test_the_tables_by_hand() -> None:
    lacking = Said("a machine", None, "no such package", lacks=True)
    found = {
        Cell("sft", 2, "optimizer", "fp32", False): ran(1.23e-7),
        Cell("sft", 2, "optimizer", "bf16", True): ran(0.2),
        Cell("dpo", 0, "none", "fp16", False): Said("a machine", None, "rank 1: ValueError('no')"),
        Cell("sft", 3, "none", "bf16", False, "adamw_8bit"): lacking,
        Cell("sft", 1, "none", "bf16", False, "adamw_8bit"): lacking,
        Cell("sft", 3, "none", "bf16", True, zeropp="int8 weights"): ran(0.2),
    }
    on_cpu = tables_of(found, "cpu").split("\n\n")[0]
    assert on_cpu.splitlines()[2:] == ["| `sft` | 2 | optimizer | 1e-07 | – | – | **2e-01** |"]
    first, second, reasons, machine = tables_of(found, "cuda").split("\n\n")
    assert first.splitlines()[2:] == ["| `dpo` | 0 | none | **failed** | – |"]
    assert second.splitlines()[2:] == [
        "| `adamw_8bit` | none | bf16, full | – | lacking | – | lacking |",
        "| int8 weights | none | bf16, LoRA | – | – | – | 2e-01 |",
    ]
    failed, lacking = reasons.splitlines()
    assert failed.startswith("- Failed (dpo, ZeRO-0, ") and failed.endswith(
        "fp16, full, adamw): rank 1: ValueError('no')"
    )
    assert lacking.startswith("- Lacking (sft, ZeRO-3, ")
    assert "bf16, full, adamw_8bit and 1 more): " in lacking and lacking.endswith(": no such package")
    assert machine == "On: a machine."
    assert [is_bad(cell, said) for cell, said in found.items()] == [False, True, True, False, False, False]


def test_a_loss_that_is_no_number_is_bad() -> None:
    assert is_bad(Cell("sft", 0, "none", "fp32", False), ran(float("nan")))


@pytest.mark.parametrize("device", matrix.PLACES)
def test_matrix_tables_are_complete_and_within_tolerance(device: str) -> None:
    table = matrix.PLACES[device].read(PAGE)
    assert table.strip(), "the page has no table for this device"
    rows = [
        [field.strip() for field in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")
    ]
    width = 3 + 2 * len(DTYPES[device])
    matrix_rows = [row for row in rows if len(row) == width and row[0].strip("`") in PIPELINES and row[1].isdigit()]
    places = [
        (pipeline, stage, offload)
        for pipeline in PIPELINES
        for stage, offloads in OFFLOADS.items()
        for offload in offloads
    ]
    assert [row[:3] for row in matrix_rows] == [
        [f"`{pipeline}`", str(stage), offload] for pipeline, stage, offload in places
    ]
    assert not [row for row in matrix_rows if "–" in row[3:]]
    assert not [row for row in rows if any(field.startswith("**") for field in row)]


def test_matrix_record_is_read_until_forgotten(tmp_path: Path) -> None:
    record = tmp_path / "cpu.jsonl"
    assert matrix.said_of(record) == {}
    cell, other = Cell("sft", 0, "none", "fp32", False), Cell("dpo", 3, "all", "bf16", True)
    matrix.write_line(record, {"cell": cell, "machine": "here", "trouble": "rank 0: it broke"})
    matrix.write_line(record, {"cell": other, "machine": "here", "difference": 0.5})
    with record.open("a", encoding="utf-8") as file:
        file.write('{"cell": ["sf')
    assert matrix.said_of(record) == {cell: Said("here", None, "rank 0: it broke"), other: Said("here", 0.5)}
    matrix.forget(record, [cell])
    assert matrix.said_of(record) == {other: Said("here", 0.5)}
