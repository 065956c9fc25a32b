"""Fixtures for tests of reward processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import limits
from tests.unit.rewards.running import descendants, open_channels


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the modules `faulty_rewards` and `awaited_rewards`, in which they create marker files."""
    for name in ("faulty", "awaited"):
        (tmp_path / f"{name}_rewards.py").write_text(Path(__file__).with_name(f"{name}.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """Check that no process, socket or pipe outlives the test. Libraries used by earlier tests may open a socket for a
    moment.
    """
    channels, processes = open_channels(), descendants(os.getpid())
    yield
    assert [pid for pid in descendants(os.getpid()) if pid not in processes] == []
    limits.until(
        lambda: open_channels() <= channels, "no socket or pipe is left", found=lambda: open_channels() - channels
    )
