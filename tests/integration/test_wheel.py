"""The wheel, installed in a separate environment without the checkout: its notebook trains the tiny task there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.release import ROOT, build_sdist, build_wheel, install, run_installed, trials
from tests import limits
from tests.unit.docs.notebooks import RUN_CELLS, TINY, code_of

pytestmark = [pytest.mark.engines, pytest.mark.full]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a new environment with the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    return install(build_wheel(build_sdist(ROOT, folder), folder), folder / "env")


def test_the_wheel_is_what_is_imported(installed: Path, tmp_path: Path) -> None:
    there = run_installed(installed, ["python", "-c", "import roll; print(roll.__file__)"], tmp_path)
    assert Path(there.strip()).is_relative_to(installed.parents[1])


def test_its_notebook_trains_the_tiny_task(installed: Path, tmp_path: Path, leaves_nothing: Callable[[], None]) -> None:
    cells = json.dumps(code_of(TINY))
    printed = run_installed(installed, ["python", "-c", RUN_CELLS], tmp_path, cells, limits.RUN)
    accuracy = json.loads(printed.splitlines()[-1])
    assert accuracy["after"] > accuracy["before"] > 0.2
    leaves_nothing()


@pytest.mark.parametrize("command", trials(), ids=" ".join)
def test_its_commands_run(installed: Path, tmp_path: Path, command: list[str]) -> None:
    printed = run_installed(installed, command, tmp_path)
    assert ("actor_train" in printed and "deepspeed_train" in printed) == ("dry_run=true" in command)
