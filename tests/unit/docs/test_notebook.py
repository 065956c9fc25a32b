"""The shipped notebooks have no outputs and use only public names and shipped experiments.
tests/integration/test_wheel.py and test_quickstart.py run them.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import roll
from roll.config.shipped import find_experiment
from tests.unit.docs.notebooks import NOTEBOOKS, SMOLLM2, TINY, cells, code_of, write_stand_ins
from tests.unit.docs.pages import links


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_is_a_notebook_without_outputs(file: Path) -> None:
    notebook = json.loads(file.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in cells(file)}) == len(cells(file))
    code = [cell for cell in cells(file) if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_the_pages_link_to_them() -> None:
    assert {"examples/tiny/tiny.ipynb", "examples/recipes/smollm2.ipynb"} <= set(links("README.md"))
    assert "../examples/tiny/tiny.ipynb" in links("docs/running.md")
    assert "../examples/recipes/smollm2.ipynb" in links("docs/recipes.md")


@pytest.mark.parametrize(
    ("file", "used"),
    [(TINY, {"Request", "evaluate", "load_config", "train"}), (SMOLLM2, {"evaluate", "load_config", "train"})],
)
def test_it_imports_public_names_alone(file: Path, used: set[str]) -> None:
    imports = [node for text in code_of(file) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports if node.module == "roll" for alias in node.names}
    assert names == used and names <= set(roll.__all__)


def test_the_notebook_of_sums_trains_with_its_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train` begins with `load_config` of its arguments, which stands for it here."""
    monkeypatch.chdir(tmp_path)
    write_stand_ins(tmp_path)
    names: dict[str, Any] = {"HAS_GPU": False, "load_config": roll.load_config, "train": roll.load_config}
    for cell in code_of(SMOLLM2)[1:4]:
        exec(cell, names)  # noqa: S102
    assert "last_number" in str(names["trained"].rewards) and names["trained"].max_steps == 2


@pytest.mark.parametrize(
    ("file", "experiments"),
    [
        (TINY, {"tiny/tiny_warm_up", "tiny/tiny_rlvr_lora_zero3"}),
        (SMOLLM2, {"smollm2_sums_grpo", "smollm2_sums_cpu"}),
    ],
)
def test_its_experiments_are_shipped(file: Path, experiments: set[str]) -> None:
    assert set(loaded(file)) == experiments
    assert all(find_experiment(name) for name in experiments)


def loaded(file: Path) -> Iterator[str]:
    """Yield the names that a notebook gives `load_config`."""
    for node in [node for text in code_of(file) for node in ast.walk(ast.parse(text))]:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "load_config":
            yield from (str(one.value) for one in ast.walk(node.args[0]) if isinstance(one, ast.Constant))
