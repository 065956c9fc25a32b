"""The installed package: its version, its commands and its types."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import roll
from tests import limits

ROOT = Path(__file__).resolve().parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SCRIPTS = PYPROJECT["project"]["scripts"]


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PYPROJECT["project"] and PYPROJECT["project"]["dynamic"] == ["version"]
    assert ROOT / PYPROJECT["tool"]["hatch"]["version"]["path"] == Path(roll.__file__)


def test_importing_roll_is_light_and_exposes_functions() -> None:
    script = """
import sys
import roll
print(sorted(name for name in sys.modules if name.startswith("roll.")), {"torch", "ray", "pydantic",
"hydra"} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=limits.PROCESS, check=True
    )
    assert done.stdout.splitlines() == ["[] set()"]
    assert {getattr(roll, name).__module__ for name in ("load_config", "evaluate", "train")} == {"roll.api"}


def test_changelog_has_dated_section_of_version() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(roll.__version__)} \(\d{{4}}-\d\d-\d\d\)", headings[1])


def test_changelog_entries_are_one_line() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith(" ")] == []


def test_releases_begin_with_notes() -> None:
    releases = re.split(r"^## .+\n\n", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[2:]
    assert releases and all(release[0].isalpha() for release in releases)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_command_prints_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, function = SCRIPTS[name].split(":")
    try:
        status = getattr(import_module(module), function)(["--help"])
    except SystemExit as stop:
        status = stop.code
    assert status in (0, None)
    printed = capsys.readouterr().out
    assert module.removesuffix(".__main__") in printed


def test_every_program_is_a_command() -> None:
    programs = {f"roll.{file.parent.name}" for file in (ROOT / "roll").glob("*/__main__.py")}
    programs |= {
        f"roll.{file.stem}" for file in (ROOT / "roll").glob("*.py") if "__main__" in file.read_text(encoding="utf-8")
    }
    assert {target.removesuffix(":main").removesuffix(".__main__") for target in SCRIPTS.values()} == programs


def test_the_package_carries_its_types() -> None:
    assert (ROOT / "roll" / "py.typed").is_file()
