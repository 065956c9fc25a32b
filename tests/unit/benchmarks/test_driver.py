"""The benchmark of the driver's CPU time, on the smallest workload that fills its table. Its figures are not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import driver


def test_every_part_of_every_size_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "driver.json"
    monkeypatch.setattr("sys.argv", ["driver.py", "--samples", "16,32", "--mean-length", "4", "--json", str(file)])
    assert driver.main() == 0
    found = json.loads(file.read_text())
    assert found.keys() == {"16", "32"}
    printed = capsys.readouterr().out
    for parts in found.values():
        assert len(parts) == 3 + len(driver.CREDITS) and all(value >= 0 for value in parts.values())
        assert all(part in printed for part in parts)


def test_driver_yields_finished_and_scored_groups() -> None:
    groups = driver.make_groups(3, 4)
    assert [len(group.episodes) for group in groups] == [driver.GROUP] * 3
    assert all(0 < episode.length <= 16 for group in groups for episode in group.episodes)
