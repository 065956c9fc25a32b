"""The shipped notebook has no outputs and uses only public names and shipped experiments.
tests/integration/test_wheel.py runs it.
"""

from __future__ import annotations

import ast
import json

import roll
from roll.config.shipped import find_experiment
from tests.unit.docs.notebooks import TINY, cells, code_of
from tests.unit.docs.pages import links


def test_it_is_a_notebook_without_outputs() -> None:
    notebook = json.loads(TINY.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in cells(TINY)}) == len(cells(TINY))
    code = [cell for cell in cells(TINY) if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_the_pages_link_to_it() -> None:
    assert "examples/tiny/tiny.ipynb" in links("README.md") and "../examples/tiny/tiny.ipynb" in links(
        "docs/running.md"
    )


def test_it_imports_public_names_alone() -> None:
    imports = [node for text in code_of(TINY) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports if node.module == "roll" for alias in node.names}
    assert names == {"Request", "evaluate", "load_config", "train"} and names <= set(roll.__all__)


def test_its_experiments_are_shipped() -> None:
    calls = [node for text in code_of(TINY) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    named = [node.args[0] for node in calls if isinstance(node.func, ast.Name) and node.func.id == "load_config"]
    names = [ast.literal_eval(name) for name in named]
    assert names == ["tiny/tiny_warm_up", "tiny/tiny_rlvr_lora_zero3"]
    assert all(find_experiment(name).is_file() for name in names)
