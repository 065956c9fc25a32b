"""The benchmark of the host CPU time of a step, on a minimal workload. The figures themselves are not checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import host

pytestmark = pytest.mark.engines


@pytest.mark.full
def test_every_kind_of_process_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "host.json"
    monkeypatch.setattr("sys.argv", ["host.py", "--samples", "64,128", "--mean-length", "8", "--json", str(file)])
    assert host.main() == 0
    found = json.loads(file.read_text())
    printed = capsys.readouterr().out
    for size in ("64", "128"):
        parts, metrics = found["microseconds"][size], found["metrics"][size]
        assert parts.keys() == {"driver", "actor_infer", "rewards", "reward functions", "actor_train", "Ray's own"}
        assert all(part in printed and value >= 0 for part, value in parts.items())
        assert metrics["digest/trainer_0"] > 0
        assert metrics["reward/mean"] == 0.5, "half of the responses are right"
        assert metrics["staleness/mean"] == 0
