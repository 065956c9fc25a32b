"""Processes that the fork server of vLLM's engine forks have their title and the variables of their start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import limits

SCRIPT = """
import os, sys, time
from pathlib import Path

def say(queue):
    import setproctitle
    setproctitle.setproctitle("VLLM::EngineCore")
    title = Path("/proc/self/cmdline").read_text().rstrip(chr(0))
    queue.put((title, os.environ.get("FIRST"), os.environ.get("LAST"), "GONE" in os.environ))

if __name__ == "__main__":
    from roll.engines.vllm import fork_server
    fork_server.IMPORTED[1:] = []  # vLLM itself takes long
    fork_server.start_fork_server(compiles=True, batch_invariant=False)
    os.environ[sys.argv[1]] = "changed"
    del os.environ["GONE"]
    context = fork_server.EngineContext()
    queue = context.SimpleQueue()
    process = context.Process(target=say, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
"""


@pytest.mark.parametrize("changed", ["FIRST", "LAST"])
def test_an_engine_keeps_title_if_variables_change(changed: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    given = {"FIRST": "1", "GONE": "1", "PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd(), "LAST": "2"}
    said = subprocess.run(
        [sys.executable, tmp_path / "script.py", changed],
        env=given,
        capture_output=True,
        text=True,
        timeout=limits.PROCESS,
        check=True,
    )
    values = {"FIRST": "1", "LAST": "2"} | {changed: "changed"}
    assert said.stdout.strip() == str(("VLLM::EngineCore", values["FIRST"], values["LAST"], False))
