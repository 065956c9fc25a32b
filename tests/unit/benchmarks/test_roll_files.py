"""The dry runs of ROLL's files: which files are taken, and what is printed about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.roll_files import main
from tests.unit.docs.pages import blocks


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder like a clone of ROLL, with one file that is planned, one that is not, and two to leave out."""
    (block,) = [
        block for block in blocks("docs/moving/from_roll.md") if block.option("file") == "shop/agentic_shop.yaml"
    ]
    files = {
        "shop/good": block.text,
        "shop/bad": "max_steps: many",
        "qwen-vl-rlvr/pictures": "",
        "config/preset": "a: 1",
    }
    for name, text in files.items():
        file = tmp_path / "examples" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(("least", "status"), [("1", 0), ("2", 1)])
def test_text_files_are_planned_and_counted(
    checkout: Path, least: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(checkout), "--at-least", least]) == status
    bad, good, count = capsys.readouterr().out.splitlines()
    assert bad.split()[:2] == ["shop/bad.yaml", "2"] and good.split()[:2] == ["shop/good.yaml", "0"]
    assert int(good.split()[2]) > 10 and count.startswith("1 of 2 ")


def test_files_of_pictures_are_planned_on_request(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(checkout), "--pictures"]) == 0
    (file, count) = capsys.readouterr().out.splitlines()
    assert file.split()[:2] == ["qwen-vl-rlvr/pictures.yaml", "2"] and count.startswith("0 of 1 ")
