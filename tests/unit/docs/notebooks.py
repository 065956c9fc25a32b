"""Reads the cells of the shipped notebooks, and runs them as a kernel does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def cells(notebook: Path) -> list[dict[str, Any]]:
    """Return all cells, in order."""
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def code_of(notebook: Path) -> list[str]:
    """Return the text of each code cell."""
    return ["".join(cell["source"]) for cell in cells(notebook) if cell["cell_type"] == "code"]
