"""A server of S3 on this machine, with hosts that have no folder in common."""

from __future__ import annotations

import json
import multiprocessing
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests import limits
from tests.unit.stores.relay import Relay
from tests.unit.stores.stub_run import run_apart

SECRET = "a-secret-of-the-store"
KEYS = {"AWS_ACCESS_KEY_ID": "an-id-of-the-store", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.unit.stores.stub_run"])
"""Its libraries take seconds to import, and each run would import them."""


@dataclass(frozen=True)
class Run:
    """A process with a run, whose output goes to a file."""

    process: ForkServerProcess
    log: Path

    def end(self) -> tuple[int, str]:
        """Wait for the end. Return the exit status and the output."""
        self.process.join(limits.PROCESS)
        assert self.process.exitcode is not None, f"the run did not end: {self.log.read_text()}"
        return self.process.exitcode, self.log.read_text()

    def kill(self) -> None:
        """Kill the process as `kill -9` does."""
        self.process.kill()
        self.process.join(limits.END)


@dataclass(frozen=True)
class Host:
    """A working directory of its own, whose runs reach the server through a relay."""

    folder: Path
    relay: Relay

    def start(self, *words: str) -> Run:
        """Start a run without engines; see `stub_run`."""
        log = self.folder / f"{uuid.uuid4().hex}.log"
        process = FORKS.Process(target=run_apart, args=(self.folder, KEYS | self.environment, log, list(words)))
        process.start()
        return Run(process, log)

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ENDPOINT_URL": self.relay.address}

    def run(self, *words: str) -> tuple[int, str]:
        """Run to the end. Return the exit status and the output."""
        return self.start(*words).end()

    def losses(self, name: str) -> list[tuple[int, float]]:
        """Return the step and the loss of each line of a run's metrics."""
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [(one["step"], one["sft/loss"]) for one in map(json.loads, lines)]


@pytest.fixture(scope="package")
def server() -> Iterator[int]:
    """Return the port of a server of S3 with the bucket `runs`. It and its keys end with the tests of this folder."""
    moto: Any = pytest.importorskip("moto.server", reason="moto and s3fs are not installed: no store is tested")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        running.start()
        _, port = running.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("runs")
        yield port
        running.stop()


@pytest.fixture
def hosts(server: int, tmp_path: Path) -> tuple[Host, Host]:
    """Return two hosts."""
    relay = Relay(server)
    found = [Host(tmp_path / name, relay) for name in ("one", "other")]
    for host in found:
        host.folder.mkdir()
    return found[0], found[1]
