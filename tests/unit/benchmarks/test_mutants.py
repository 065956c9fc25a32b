"""The mutants of `benchmarks/mutants.py` fit the code, their tests exist, and a survivor is reported."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from benchmarks import mutants
from benchmarks.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_changes_code_and_has_a_test(name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    (tmp_path / mutant.file).parent.mkdir(parents=True)
    before = (ROOT / mutant.file).read_text()
    (tmp_path / mutant.file).write_text(before)
    mutant.apply(tmp_path)
    after = (tmp_path / mutant.file).read_text()
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
    file, test = mutant.test.split("::")
    tree = ast.parse((ROOT / "tests" / "unit" / file).read_text())
    [found] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == test]
    assert not any("mark.full" in ast.unparse(mark) for mark in found.decorator_list)


@pytest.mark.parametrize(("catches", "status"), [(True, 0), (False, 1)])
def test_a_survivor_is_an_error(
    catches: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken: list[bool] = []

    def passes(root: Path, *tests: str) -> bool:
        broken.append("VALUE = 2" in (root / "roll/value.py").read_text())
        return not (broken[-1] and catches)

    def tree(source: Path, target: Path) -> None:
        (target / "value.py").parent.mkdir()
        (target / "value.py").write_text("VALUE = 1\n")

    monkeypatch.setattr(mutants, "PARTS", ("roll",))
    monkeypatch.setattr(
        mutants, "MUTANTS", {"value": Mutant("roll/value.py", "VALUE = 1", "VALUE = 2", "test_value.py::test")}
    )
    monkeypatch.setattr(mutants, "passes", passes)
    monkeypatch.setattr(mutants.shutil, "copytree", tree)
    monkeypatch.setattr(mutants.shutil, "copy", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["mutants.py"])
    assert mutants.main() == status
    assert broken == [False, True]
    assert ("SURVIVED value" in capsys.readouterr().out) is not catches
