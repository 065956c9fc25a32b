"""What is left of a cluster whose start is cut off."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from roll.workers import cluster

HEAD = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
time.sleep(60)
"""


def is_running(pid: int) -> bool:
    """An orphan that was killed exists until it is reaped, whenever the host does that."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("cut_off", "raised"),
    [(SystemExit(15), KeyboardInterrupt), (KeyboardInterrupt(), KeyboardInterrupt), (OSError(), cluster.ClusterUnavailable)],
)
def test_a_start_that_is_cut_off_leaves_nothing(
    cut_off: BaseException, raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself answers SIGTERM with `sys.exit(15)` from then on, and forgets what it has started by then."""
    pids: list[int] = []

    def init(_temp_dir: str, **_: object) -> None:
        head = subprocess.Popen([sys.executable, "-c", HEAD], stdout=subprocess.PIPE, text=True)
        assert head.stdout is not None
        pids.extend([head.pid, int(head.stdout.readline())])
        raise cut_off

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(cluster, "GRACE", 0.5)
    monkeypatch.setattr(cluster, "temporary", lambda: tmp_path)
    with pytest.raises(raised), cluster.cluster(tmp_path / "run", 0, 8):
        raise AssertionError("a cluster that did not start")
    assert len(pids) == 2 and not any(map(is_running, pids))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
