"""The translations of other programs' checkouts: which texts are taken, and what is printed about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.converted import main, texts

SCRIPT = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B data.train_files=a.parquet\n"
PAGE = f"Start it:\n\n```bash\n{SCRIPT}```\n\nor\n\n```python\npass\n```\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder like a clone of verl: a script, a page, one without a model, one about images, and others."""
    files = {
        "verl/examples/good.sh": SCRIPT,
        "verl/docs/page.md": PAGE,
        "verl/examples/bad.sh": SCRIPT.replace("Qwen/Qwen2.5-7B", "$MODEL"),
        "verl/examples/pictures.sh": f"{SCRIPT.strip()} data.image_key=images\n",
        "verl/examples/other.sh": "echo nothing\n",
        "verl/other.yaml": "a: 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / "verl"


@pytest.mark.parametrize(("least", "status"), [("2", 0), ("3", 1)])
def test_sources_are_translated_planned_and_counted(
    checkout: Path, least: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(checkout), "--at-least", least]) == status
    *rows, count, _ = capsys.readouterr().out.splitlines()
    assert {row.split()[0]: row.split()[1] for row in rows} == {
        "verl/docs/page.md": "0",
        "verl/examples/bad.sh": "2",
        "verl/examples/good.sh": "0",
        "verl/examples/pictures.sh": "-",
    }
    assert count.startswith("2 of 3 are planned; 1 more")


def test_commands_of_pages_and_docstrings_are_found(checkout: Path) -> None:
    (checkout / "run.py").write_text(f'"""Run it.\n\n{SCRIPT}"""\nx = 1\n', encoding="utf-8")
    assert texts(checkout / "run.py", checkout) == [(".sh", SCRIPT.rstrip("\n"))]
    assert texts(checkout / "docs" / "page.md", checkout) == [(".sh", SCRIPT.rstrip("\n"))]


def test_python_that_builds_a_trainer_is_found(checkout: Path) -> None:
    trains = "SFTTrainer('m', train_dataset='a.jsonl')\n"
    cells = [("markdown", [trains]), ("code", ["!pip install trl\n", "if x:\n", "  %cd y\n"]), ("code", [trains])]
    notebook = {"cells": [{"cell_type": kind, "source": source} for kind, source in cells]}
    found = {
        "run.py": (trains, [(".py", trains)]),
        "idle.py": ("x = 1\n", []),
        "page.md": (f"```python\n{trains}```\n\n```python\npass\n```\n", [(".py", trains)]),
        "run.ipynb": (json.dumps(notebook), [(".py", f"pass\nif x:\n  pass\n\n{trains}".rstrip("\n"))]),
    }
    for name, (text, parts) in found.items():
        (checkout / name).write_text(text, encoding="utf-8")
        assert texts(checkout / name, checkout) == parts
