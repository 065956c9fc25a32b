"""vLLM's processes end when the process that started them ends, even if it was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import limits

pytestmark = pytest.mark.engines

PROGRAM = """
import multiprocessing, os, time

def engine(said):
    from roll.weight_sync.vllm_plugin import register
    register()  # as vLLM does in each of its processes
    said.send(os.getpid())
    time.sleep(3600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    hear, say = context.Pipe(duplex=False)
    context.Process(target=engine, args=(say,)).start()
    print(hear.recv(), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_engine_ends_with_its_killed_worker(tmp_path: Path) -> None:
    file = tmp_path / "worker.py"
    file.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(file)], stdout=subprocess.PIPE, text=True, timeout=limits.PROCESS, check=False
    )
    assert done.returncode == -9
    limits.until(
        lambda: not is_running(int(done.stdout.splitlines()[-1])), "the engine ends with its worker", limits.END
    )


def is_running(pid: int) -> bool:
    """Return whether the process runs. A killed process remains as a zombie until it is reaped, and does not count as
    running.
    """
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
