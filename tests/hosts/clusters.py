"""Ray clusters on the hosts of a lab, and runs in them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import limits
from tests.hosts.lab import WORK, Host, Lab

PORT = 6379


@contextmanager
def ray_cluster(made: Lab, names: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """Start Ray with `python -m roll.cluster` on the first host; yield the variables with which a run joins it.

    `names`: the hosts of the hostfile, by default their IPv4 addresses. The first is that of the head.
    """
    yield start_cluster(made, names)
    made.hosts[0].run("python", "-m", "roll.cluster", "hostfile", "stop", "--run")


def start_cluster(made: Lab, names: Sequence[str] = ()) -> dict[str, str]:
    """Do what `ray_cluster` does, and leave the cluster to the end of the lab, for hosts that may die before."""
    head = made.hosts[0]
    lines = [f"{name} slots=1\n" for name in names or [host.address for host in made.hosts]]
    head.path("hostfile").write_text("".join(lines))
    said = head.run("python", "-m", "roll.cluster", "hostfile", "--run")
    words = said.strip().splitlines()[-1].split()
    return dict(word.split("=", 1) for word in words if word.startswith("RAY_"))


def train(host: Host, cluster: dict[str, str], *arguments: str, folder: str = WORK) -> subprocess.Popen[str]:
    """Start `python -m roll.pipeline` on a host, with `folder` as its working directory."""
    words = ("env", f"--chdir={folder}", "python", "-m", "roll.pipeline", *arguments)
    return host.start(*words, environment=cluster)


def ended(run: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit status and the output of a run."""
    output, _ = run.communicate(timeout=limits.RUN)
    return run.returncode, output


def metrics(host: Host, name: str) -> list[dict[str, Any]]:
    """Return the lines of the metrics of a run whose folder is on this host."""
    path = host.path(Path(name) / "metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
