"""A release contains all files that the package reads, and no tests. tests/integration/test_wheel.py installs it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from benchmarks.release import ROOT, build_sdist, build_wheel, source_files, trials, wheel_faults

READ = {
    "roll/py.typed",
    "roll/config/schema/foreign_names.yaml",
    "roll/_examples/config/deepspeed_zero3.yaml",
    "roll/_requirements/cpu.lock",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    return build_wheel(build_sdist(ROOT, folder), folder)


def test_wheel_from_sdist_holds_every_file(wheel: Path) -> None:
    assert list(wheel_faults(wheel, source_files(ROOT))) == []
    assert {*zipfile.ZipFile(wheel).namelist()} >= READ


def test_missing_and_further_files_are_faults(wheel: Path) -> None:
    expected = source_files(ROOT) - {"roll/py.typed"} | {"roll/more.yaml"}
    assert list(wheel_faults(wheel, expected)) == [
        "missing in the wheel: roll/more.yaml",
        "only in the wheel: roll/py.typed",
    ]


def test_every_command_of_a_release_is_tried() -> None:
    assert {command[0] for command in trials()} >= {"roll", "roll-export", "roll-doctor", "python"}
