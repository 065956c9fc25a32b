"""vLLM's own processes end with the process that started them, however that ends."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.engines

PROGRAM = """
import multiprocessing, os, time

def engine(said):
    from roll.weight_sync.vllm_plugin import register
    register()  # as vLLM does in each of its processes
    said.send(os.getpid())
    time.sleep(120)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    hear, say = context.Pipe(duplex=False)
    context.Process(target=engine, args=(say,)).start()
    print(hear.recv(), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_an_engine_does_not_outlive_a_worker_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "worker.py"
    file.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(file)], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == -9
    try:
        engine = psutil.Process(int(done.stdout))
        deadline = time.monotonic() + 5
        while engine.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the engine goes on without its worker"
            time.sleep(0.05)
    except psutil.NoSuchProcess:
        pass
