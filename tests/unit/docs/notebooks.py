"""Reads the cells of the shipped notebook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from roll.config.shipped import examples_folder

TINY = examples_folder() / "tiny" / "tiny.ipynb"


def cells(notebook: Path) -> list[dict[str, Any]]:
    """Return all cells, in order."""
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def code_of(notebook: Path) -> list[str]:
    """Return the text of each code cell."""
    return ["".join(cell["source"]) for cell in cells(notebook) if cell["cell_type"] == "code"]
