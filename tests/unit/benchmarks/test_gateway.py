"""The benchmark of the gateway's latency, on the smallest workload that fills its table. Its figures are not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gateway


@pytest.mark.full
@pytest.mark.parametrize("api", gateway.APIS)
def test_all_answers_are_measured(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gateway.json"
    given = ["--api", api, "--sessions", "3", "--turns", "2", "--seconds", "0.1", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["gateway.py", *given])
    assert gateway.main() == 0
    found = json.loads(file.read_text())
    assert found["requests"] == 6 and found["plain_requests"] == 6
    printed = capsys.readouterr().out
    assert all(name in printed for name in found)
