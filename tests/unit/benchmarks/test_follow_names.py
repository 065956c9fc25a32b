"""Own code follows the modules and names of roll that moved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
OLD = """
from roll.environments.calculator import Calculator
from roll.strategies.settings import HfGenerateSettings

def limits():
    from roll.data.examples import Limits, prepare_examples
    return Limits
"""
NEW = """
from roll.agents.environments.calculator import Calculator
from roll.engines.hf.settings import HfGenerateSettings

def limits():
    from roll.data.examples import LengthLimits as Limits
    from roll.data.examples import prepare_examples
    return Limits
"""


def test_old_imports_are_rewritten(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OLD, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "follow_names.py", tmp_path], capture_output=True, text=True, check=True
    )
    assert own.read_text(encoding="utf-8") == NEW
    assert done.stdout.split() == [str(own)]
    exec(compile(NEW, "own", "exec"), {})


def test_every_new_name_exists() -> None:
    for line in (ROOT / "benchmarks" / "names.tsv").read_text(encoding="utf-8").splitlines():
        module, _, name = line.split("\t")[1].rpartition(".")
        path = ROOT.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        text = file.read_text(encoding="utf-8")
        assert any(f"{kind} {name}" in text for kind in ("class", "def")), line


def test_joined_modules_are_gone_and_targets_exist() -> None:
    for line in (ROOT / "benchmarks" / "merged.tsv").read_text(encoding="utf-8").splitlines():
        old, new = (ROOT.joinpath(*module.split(".")) for module in line.split("\t"))
        assert not old.with_suffix(".py").exists(), line
        assert new.with_suffix(".py").exists() or (new / "__init__.py").exists(), line


def test_modules_that_moved_twice_are_followed(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("from roll.algorithms.methods.kinds import Kind\n", encoding="utf-8")
    subprocess.run([sys.executable, ROOT / "benchmarks" / "follow_names.py", tmp_path], check=True)
    assert own.read_text(encoding="utf-8") == "from roll.algorithms.methods import MethodKey as Kind\n"
