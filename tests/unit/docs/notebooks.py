"""Reads the cells of the shipped notebooks, and runs them as a kernel does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.tiny.make_model import write_model
from roll.config.shipped import examples_folder

TINY = examples_folder() / "tiny" / "tiny.ipynb"
SMOLLM2 = examples_folder() / "recipes" / "smollm2.ipynb"
NOTEBOOKS = (TINY, SMOLLM2)
RUN_CELLS = """
import asyncio
import json
import sys

async def notebook():
    names = {"__name__": "__main__"}
    for number, cell in enumerate(json.load(sys.stdin)):
        exec(compile(cell, f"cell {number}", "exec"), names)
    print(json.dumps({"before": names["before"].value, "after": names["after"].value}))

asyncio.run(notebook())
"""
"""A program that runs cells as a notebook's kernel does: in one namespace, inside a running event loop."""


def write_stand_ins(folder: Path) -> None:
    """Write a tiny model and rows in the places of those that the first cell of `SMOLLM2` would fetch and generate."""
    write_model(folder / "models" / "smollm2-135m", seed=0, agent=True)
    pairs = [(a, b) for a in range(9) for b in range(9)]
    rows = [{"prompt": f"{a} + {b} =", "ground_truth": str(a + b), "tag": "chain_sum"} for a, b in pairs]
    (folder / "data" / "digit_sums").mkdir(parents=True)
    for name in ("train", "validation", "test"):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "data" / "digit_sums" / f"{name}.jsonl").write_text(lines)


def cells(notebook: Path) -> list[dict[str, Any]]:
    """Return all cells, in order."""
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def code_of(notebook: Path) -> list[str]:
    """Return the text of each code cell."""
    return ["".join(cell["source"]) for cell in cells(notebook) if cell["cell_type"] == "code"]
