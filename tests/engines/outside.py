"""A vLLM server outside any run, as docs/running.md starts one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from roll.system.leftovers import Leftovers
from tests import limits

FLAGS = (
    "--enable-scale-out",
    "--dtype=float32",
    "--enforce-eager",
    "--kv-cache-memory-bytes=268435456",
    "--no-enable-chunked-prefill",
    "--max-num-batched-tokens=8192",
    "--generation-config=vllm",
    "--logprobs-mode=processed_logprobs",
    '--weight-transfer-config={"backend": "roll"}',
)
VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}
TEMPORARY = "TMPDIR"
"""The variable with a server's temporary folder, which has its sockets."""


def free_port() -> int:
    """Return a port of this host that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_server(model: Path, port: int, log: Path, flags: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a server in a session and with a temporary folder of its own. It does not answer yet.

    `vllm serve` does not run with `vllm-cpu`.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--host=127.0.0.1"]
    with log.open("ab") as stream:
        return subprocess.Popen(
            [*command, f"--port={port}", *FLAGS, *flags],
            stdout=stream,
            stderr=stream,
            env=os.environ | VARIABLES | {TEMPORARY: tempfile.mkdtemp(prefix="server-")},
            start_new_session=True,
        )


def wait_for_server(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until the server answers."""

    def answers() -> bool:
        assert server.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            return client.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    with httpx.Client(base_url=url, trust_env=False) as client:
        limits.until(answers, f"{url} answers", limits.START)


def end_server(server: subprocess.Popen[bytes]) -> None:
    """Kill the server with all of its processes, and remove the shared memory and the temporary folder it leaves."""
    left, temporary = Leftovers(), None
    if server.poll() is None:
        left.record([server.pid])
        temporary = psutil.Process(server.pid).environ().get(TEMPORARY)
        os.killpg(server.pid, signal.SIGKILL)
    server.wait(limits.END)
    left.kill(limits.END)
    if temporary:
        shutil.rmtree(temporary)


@contextmanager
def serving_outside(model: Path, folder: Path, *flags: str) -> Iterator[str]:
    """Yield the address of a server of a model. End it on exit."""
    port, log = free_port(), folder / "server.log"
    server, url = start_server(model, port, log, flags), f"http://127.0.0.1:{port}"
    try:
        wait_for_server(server, url, log)
        yield url
    finally:
        end_server(server)
