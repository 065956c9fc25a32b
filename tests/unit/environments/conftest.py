from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.rewards.conftest import nothing_left_behind

__all__ = ["nothing_left_behind"]


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with an importable copy of `worlds.py`. Its environments leave their marks in the same folder."""
    (tmp_path / "worlds.py").write_text(Path(__file__).with_name("worlds.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path
