"""The benchmark command of docs/performance.md runs, and its table is made of what it measured. Its figures are not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import LIMIT, ROOT

pytestmark = pytest.mark.engines


def test_step_against_its_floors(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), "--steps", "4", "--json", str(tmp_path / "step.json")]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "step.json").read_text())
    parts = ("rollout", "reference", "train", "weight_sync")
    assert all(result["step"][part] > 0 for part in parts)
    assert result["step"]["step"] >= max(result["step"][part] for part in parts)
    assert set(result["floors"]) == {"generate", "forward", "train"} and min(result["floors"].values()) > 0
    assert result["ratio"] == pytest.approx(result["step"]["step"] / sum(result["floors"].values()))
    assert f"{result['ratio']:.2f}" in finished.stdout
