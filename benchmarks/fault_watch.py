"""Observes a run from outside: its processes, its phase and its log."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.fault_plan import Kind, Phase

PROC, SHARED = Path("/proc"), Path("/dev/shm")  # noqa: S108
LONG_CALL = 0.12
"""Minimum seconds of a trainer's call to count as an update or a forward pass. The calls of a sync are shorter with the
tiny model.
"""
TICKS = 3
"""Minimum CPU ticks of 10 ms between two checks for an engine to count as generating."""
LOOK = 0.03
"""Seconds between two checks."""
LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (\w+) [\w.]+: (.*)")
STEP = re.compile(r"step (\d+)/\d+ ")


@dataclass(frozen=True)
class Seen:
    """A process of a run."""

    pid: int
    parent: int
    command: str
    log: str
    """Stem of its log file, such as `actor_train-1`."""


@dataclass(frozen=True)
class Said:
    """A line of `driver.log`."""

    at: float
    """Seconds since the epoch."""
    level: str
    text: str


def _is_actor(one: Seen) -> bool:
    return one.command.startswith("ray::")


VICTIMS: Mapping[Kind, tuple[str, Callable[[Seen], bool]]] = {
    Kind.ENGINE: ("actor_infer-", _is_actor),
    Kind.CORE: ("actor_infer-", lambda one: "EngineCore" in one.command),
    Kind.TRAINER: ("actor_train-", _is_actor),
    Kind.REFERENCE: ("reference-", _is_actor),
    Kind.REWARD: ("rewards.arithmetic-", _is_actor),
    Kind.CHILD: ("", lambda one: "roll.rewards.child" in one.command),
    Kind.JUDGE: ("rewards.judged-", _is_actor),
    Kind.RAYLET: ("", lambda one: one.command.split(" ")[0].endswith("/raylet")),
    Kind.GCS: ("", lambda one: one.command.split(" ")[0].endswith("/gcs_server")),
}
"""By kind: the prefix of its log's name, empty if it has no log of its own, and a test that identifies its process."""


class Course:
    """Reads `driver.log` as it grows."""

    def __init__(self, folder: Path) -> None:
        self._path, self._read = folder / "logs" / "driver.log", 0
        self.lines: list[Said] = []

    def look(self) -> list[Said]:
        """Return the lines since the last check."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as stream:
            stream.seek(self._read)
            text = stream.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        found = [match for line in whole.decode(errors="replace").splitlines() if (match := LINE.match(line))]
        new = [
            Said(datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp(), level, text)
            for at, level, text in (m.groups() for m in found)
        ]
        self.lines += new
        return new

    def since(self, at: float, pattern: str) -> Said | None:
        """Return the first line that was logged at the time `at` or later and contains a match of `pattern`; None if
        there is none yet.
        """
        return next((line for line in self.lines if line.at >= at - 0.001 and re.search(pattern, line.text)), None)

    @property
    def step(self) -> int:
        """Return the last logged step, -1 before the first."""
        return next((int(match[1]) for line in reversed(self.lines) if (match := STEP.match(line.text))), -1)


class Watch:
    """The processes of one attempt of a run."""

    def __init__(self, driver: int, folder: Path) -> None:
        self.driver, self._folder = driver, folder
        self.began = time.time()
        self._seen: list[Seen] = []
        self._looked = 0.0
        self._ticks: dict[int, int] = {}
        self._calls: dict[int, float] = {}
        self._written = self._shared_times()

    def processes(self) -> list[Seen]:
        """Return the driver's descendants, queried at most five times a second."""
        if time.monotonic() - self._looked > 0.2:
            self._seen, self._looked = list(_descendants(self.driver)), time.monotonic()
        return self._seen

    def victims(self, kind: Kind) -> dict[int, int]:
        """Return the process ids of a kind by rank."""
        if kind is Kind.DRIVER:
            return {0: self.driver}
        prefix, is_one = VICTIMS[kind]
        found = [one for one in self.processes() if one.log.startswith(prefix) and is_one(one)]
        if prefix:
            return {int(one.log.rpartition("-")[2]): one.pid for one in found if not self._is_fork(one)}
        return {rank: one.pid for rank, one in enumerate(sorted(found, key=lambda one: one.pid))}

    def _is_fork(self, one: Seen) -> bool:
        """Whether a process is a fresh fork of a worker that still has the worker's name."""
        return any(
            other.pid == one.parent and other.log == one.log and other.command == one.command for other in self._seen
        )

    def phases(self) -> set[Phase]:
        """Return the current phases of the run, judged by its files and processes. Empty if no phase is recognised."""
        found = set()
        if any((self._folder / "checkpoints").glob(".step_*")):
            found.add(Phase.SAVE)
        if (written := self._shared_times()) != self._written:
            self._written = written
            found.add(Phase.SYNC)
        if self._is_training() and not found:
            found.add(Phase.TRAIN)
        if self._is_generating() and not found:
            found.add(Phase.GENERATE)
        return found

    def _shared_times(self) -> dict[str, int]:
        """Return the modification times of this run's weight-sync files."""
        times = {}
        for path in SHARED.glob(f"roll-{self.driver}-*/*"):
            if path.suffix == ".safetensors":
                with suppress(OSError):
                    times[str(path)] = path.stat().st_mtime_ns
        return times

    def _is_training(self) -> bool:
        """Whether a rank of the trainer runs a long call."""
        now, working = time.monotonic(), False
        for pid in self.victims(Kind.TRAINER).values():
            if _command(pid).startswith("ray::Process.call"):
                working |= now - self._calls.setdefault(pid, now) > LONG_CALL
            else:
                self._calls.pop(pid, None)
        return working

    def _is_generating(self) -> bool:
        """Whether an engine computes while no rank of the trainer runs a call."""
        working = False
        for one in self.processes():
            if one.log.startswith("actor_infer-") and "VLLM::" in one.command:
                ticks = _cpu_ticks(one.pid)
                working |= ticks - self._ticks.get(one.pid, ticks) >= TICKS
                self._ticks[one.pid] = ticks
        return working and not self._calls


def _descendants(driver: int) -> Iterator[Seen]:
    """Yield the driver's descendants, found in one pass over /proc."""
    parents = {}
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            with suppress(OSError, ValueError):
                parents[int(folder.name)] = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
    for pid, parent in parents.items():
        ancestor, passed = parent, set()
        while ancestor and ancestor != driver and ancestor not in passed:
            passed.add(ancestor)
            ancestor = parents.get(ancestor, 0)
        if ancestor == driver:
            with suppress(OSError):
                log = (PROC / str(pid) / "fd" / "1").readlink()
                yield Seen(pid, parent, _command(pid), log.stem if log.suffix == ".log" else "")


def _command(pid: int) -> str:
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _cpu_ticks(pid: int) -> int:
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return int(fields[11]) + int(fields[12])
    except OSError:
        return 0


def is_running(pid: int) -> bool:
    """Whether a process exists and is neither stopped nor ended."""
    with suppress(OSError):
        return (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"T", b"Z", b"X")
    return False
