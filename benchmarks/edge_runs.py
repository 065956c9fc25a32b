"""Plays the runs of `edge_faults.py`: starts them, strikes when it is a fault's turn, and inspects what is left."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.edge_strikes import FOLDER, STRIKES, Strike
from benchmarks.fault_plan import Kind
from benchmarks.fault_runs import ALARM, differences
from benchmarks.fault_watch import LOOK, PROC, SHARED, STEP, Course, Said, Watch

ROOT = Path(__file__).parents[1]
LONGEST, LONGEST_FAULT = 400.0, 100.0
"""Deadline of an attempt in seconds, and what each fault adds. A longer attempt is ended, and counts as hanging."""
HANGING = -1
"""Status that is reported for an attempt that hangs."""
GRACE = 15.0
"""Seconds after the end of the driver in which its processes may still end."""


class Reader(StrEnum):
    """What reads the output of a run."""

    FILE = "file"
    GONE = "gone"
    """Nobody, from the start."""
    PIPE = "pipe"
    """A process that reads stdout and that a fault may kill."""
    TERMINAL = "terminal"
    """A terminal, which is the run's controlling terminal, and which a fault may close."""


@dataclass(frozen=True)
class Hit:
    """A signal from outside to one process."""

    target: Kind | str
    """A kind of process, or the stem of the log file of a role's process."""
    signal: signal.Signals
    rank: int = 0
    delay: float = 0.0
    """Seconds after the previous signal."""


@dataclass(frozen=True)
class Fault:
    """A fault, and what the run must say about it."""

    name: str
    place: str = ""
    """Method in which it strikes; see `Strike`. Empty if it comes from outside."""
    log: str = ""
    action: str = "kill"
    is_after: bool = False
    hits: tuple[Hit, ...] = ()
    """Signals from outside, sent once the fault has struck at its place, if it has one."""
    steps: int = 1
    """Number of steps to log after the previous fault has healed. 0 means from the start."""
    at_once: bool = False
    """Whether it may strike before the previous fault has healed."""
    is_inside: bool = False
    """Whether a process inflicts it on itself without a place, as in `edge_world`."""
    deletes: str = ""
    """Files of the run's folder that are deleted first, as a pattern. The newest one stays."""
    closes_reader: bool = False
    noticed: str = ALARM.pattern
    """Pattern of the log's line that notices the fault. Empty if none has to."""
    back: str = STEP.pattern
    """Pattern of the line with which the run is back at work. Empty if the run ends."""
    named: str = ""
    """Pattern of the cause: in the log after the fault, or in the output. Empty if nothing has to be named."""


@dataclass(frozen=True)
class Play:
    """A run with its faults. It counts as one row for each fault."""

    name: str
    keys: tuple[str, ...]
    """Arguments of `roll.pipeline`, without the output folder."""
    faults: tuple[Fault, ...]
    statuses: tuple[tuple[int, ...], ...] = ((0,),)
    """Permitted statuses of each attempt. The same command is started again for each."""
    full: str = ""
    """Folder on which a small file system of its own is mounted: `run` for the run's folder, or an absolute path."""
    mib: int = 64
    reader: Reader = Reader.FILE
    still: str = ""
    """Name of the undisturbed run that it must equal."""


@dataclass
class Row:
    """What became of a fault. Times are seconds since the epoch."""

    fault: str
    at: float | None = None
    noticed: float | None = None
    back: float | None = None
    named: str = ""
    """The text that names the cause."""
    pid: int | None = None
    step: int = -1
    """Last step that was logged before the fault."""
    must_name: bool = False


@dataclass
class Played:
    """A run that has ended."""

    name: str
    statuses: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Processes, ports and files that it left behind."""
    unequal: list[str] = field(default_factory=list)
    compared: int = 0
    """Number of prompts compared with the undisturbed run."""
    seconds: float = 0.0
    end: float = 0.0
    is_right: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


class Player:
    """One run and its faults."""

    def __init__(self, folder: Path, play: Play) -> None:
        self._folder, self._play = folder, play
        self._run = folder / play.name
        self._strikes = folder / f"{play.name}.strikes"
        self._output = folder / f"{play.name}.out"
        self._played = Played(play.name, rows=[Row(one.name, must_name=bool(one.named)) for one in play.faults])
        self._next = 0
        self._since = 0.0
        """Time from which steps count for the next fault."""
        self._course = Course(self._run)
        self._temporary = Path(tempfile.gettempdir()) / f"e{os.getpid()}"  # short: the paths of Ray's sockets must be
        self._reader: subprocess.Popen[bytes] | None = None
        self._drivers = set[int]()

    def run(self) -> Played:
        """Run all attempts, and return what became of them. An earlier try of the same run is removed."""
        for folder in (self._run, self._strikes):
            shutil.rmtree(folder, ignore_errors=True)
        self._output.unlink(missing_ok=True)
        self._strikes.mkdir()
        self._run.mkdir()
        self._temporary.mkdir()
        (self._strikes / STRIKES).write_text(json.dumps([asdict(one) for one in self._inside()]))
        before, began = set(SHARED.iterdir()), time.time()
        try:
            for _ in self._play.statuses:
                self._played.statuses.append(self._attempt())
            self._played.end, self._played.seconds = time.time(), time.time() - began
        finally:
            processes = ended(self._strikes)
            files = [*self._temporary.iterdir(), *left_behind(set(SHARED.iterdir()) - before, self._drivers)]
            self._played.left = [*processes, *sorted(map(str, files))]
            shutil.rmtree(self._temporary)
        self._name_causes()
        if self._play.still:
            self._compare()
        self._played.is_right = self._is_right()
        return self._played

    def _inside(self) -> Iterator[Strike]:
        for one in self._play.faults:
            if one.place:
                action = one.action.replace("{run}", str(self._run))
                yield Strike(one.name, one.place, one.log, action, one.is_after)

    def _attempt(self) -> int:
        """Run the command once and strike. Return its status."""
        process = self._start()
        self._drivers.add(process.pid)
        watch = Watch(process.pid, self._run)
        if self._play.full:  # only its own processes see the mounted folder
            self._course = Course(Path(f"/proc/{process.pid}/root{self._run}"))
        self._since = watch.began
        try:
            while process.poll() is None:
                if time.time() - watch.began > LONGEST + LONGEST_FAULT * len(self._play.faults):
                    return HANGING
                self._look(watch)
                time.sleep(LOOK)
            return process.returncode
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            if self._reader is not None:
                self._reader.kill()
                self._reader.wait()
            with suppress(OSError):
                self._course.look()
            self._settle()

    def _start(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "roll.pipeline", *self._play.keys, f"output_dir={self._play.name}"]
        if self._play.full:
            place = self._run if self._play.full == "run" else self._play.full
            mount = f'mount -t tmpfs -o size={self._play.mib}m tmpfs {place} && exec "$@"'
            words = ["unshare", "--mount", "sh", "-c", mount, "sh", *words]
        paths = f"{ROOT / 'benchmarks/edge_hook'}:{ROOT}"
        env = os.environ | {"PYTHONPATH": paths, FOLDER: str(self._strikes), "OMP_NUM_THREADS": "1"}
        caches = tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"
        env |= {"TMPDIR": str(self._temporary), "TORCHINDUCTOR_CACHE_DIR": str(Path(*caches))}
        with self._output.open("ab") as out:
            if self._play.reader is Reader.TERMINAL:
                return self._start_in_terminal(words, env, out)
            stdout = out.fileno() if self._play.reader is Reader.FILE else self._pipe(out)
            process = subprocess.Popen(
                words, cwd=self._folder, stdout=stdout, stderr=out, start_new_session=True, env=env
            )
            if stdout != out.fileno():
                os.close(stdout)
        return process

    def _start_in_terminal(
        self, words: Sequence[str], env: Mapping[str, str], out: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start a run with a controlling terminal, which is closed when its reader is killed."""
        ours, theirs = os.openpty()
        self._reader = subprocess.Popen(["cat"], stdin=ours, stdout=out)
        process = subprocess.Popen(
            ["setsid", "--ctty", *words], cwd=self._folder, stdin=theirs, stdout=theirs, stderr=theirs, env=env
        )
        os.close(ours)
        os.close(theirs)
        return process

    def _pipe(self, out: IO[bytes]) -> int:
        """Return the end of a pipe to write to. Its reader writes to `out`, or has already closed it."""
        reads, writes = os.pipe()
        if self._play.reader is Reader.PIPE:
            self._reader = subprocess.Popen(["cat"], stdin=reads, stdout=out)
        os.close(reads)
        return writes

    def _look(self, watch: Watch) -> None:
        """Read the log, and strike or note what has struck."""
        self._course.look()
        self._settle()
        if self._next == len(self._play.faults):
            return
        fault, row = self._play.faults[self._next], self._played.rows[self._next]
        file = self._strikes / f"{fault.name}.struck"
        if fault.place or fault.is_inside:
            armed = file.with_suffix(".armed")
            if file.exists():
                said = json.loads(file.read_text())
                self._struck(fault, row, watch, said["at"], said["pid"])
            elif not armed.exists() and not armed.with_suffix(".claimed").exists() and self._is_turn(fault):
                armed.touch()
        elif self._is_turn(fault) and all(_victim(watch, hit) for hit in fault.hits):
            self._struck(fault, row, watch, time.time(), None)

    def _is_turn(self, fault: Fault) -> bool:
        """Whether a fault may strike now."""
        if self._next and not fault.at_once:
            previous = self._played.rows[self._next - 1]
            if self._play.faults[self._next - 1].back and previous.back is None:
                return False
            if self._course.step <= max(row.step for row in self._played.rows):
                return False  # too soon: a second failure in the same step ends the run, as it should
        return fault.at_once or len(self._steps(self._since)) >= fault.steps

    def _steps(self, since: float) -> list[Said]:
        return [line for line in self._course.lines if line.at > since and STEP.match(line.text)]

    def _struck(self, fault: Fault, row: Row, watch: Watch, at: float, pid: int | None) -> None:
        """Send the signals of a fault, and record it."""
        row.at, row.pid, row.step = at, pid, self._course.step
        if fault.deletes:
            for path in sorted(self._run.glob(fault.deletes), key=lambda path: path.stat().st_mtime)[:-1]:
                shutil.rmtree(path, ignore_errors=True)
        victims = [(hit, _victim(watch, hit)) for hit in fault.hits]
        for hit, victim in victims:
            time.sleep(hit.delay)
            if victim is not None:
                row.pid = row.pid or victim
                with suppress(ProcessLookupError):
                    os.kill(victim, hit.signal)
        if fault.closes_reader and self._reader is not None:
            self._reader.kill()
        self._next += 1
        print(f"{self._play.name}: {fault.name} ({row.pid}) after step {self._course.step}", flush=True)

    def _settle(self) -> None:
        """Note which faults were noticed and have healed."""
        for fault, row in zip(self._play.faults, self._played.rows, strict=True):
            if row.at is None or row.back is not None:
                continue
            if row.noticed is None and fault.noticed and (line := self._course.since(row.at, fault.noticed)):
                row.noticed = line.at
            begin = row.noticed if fault.noticed else row.at + 0.1
            if fault.back and begin is not None and (line := self._course.since(begin + 0.002, fault.back)):
                row.back = self._since = line.at

    def _name_causes(self) -> None:
        """Find the text that names each cause, in the driver's log, in what was printed or in the logs of roles."""
        files = [*sorted((self._run / "logs").glob("*-*.log")), self._output, self._run / "end.json"]
        printed = [text for file in files if file.exists() for text in file.read_text(errors="replace").splitlines()]
        for fault, row in zip(self._play.faults, self._played.rows, strict=True):
            if fault.named and row.at is not None:
                line = self._course.since(row.at, fault.named)
                texts = [line.text] if line else [text for text in printed if re.search(fault.named, text)]
                row.named = texts[-1].strip()[:300] if texts else ""

    def _compare(self) -> None:
        """Compare metrics and every recorded response with the undisturbed run."""
        still, mine = self._folder / self._play.still, self._run
        self._played.unequal = list(differences(lines(still / "metrics.jsonl"), lines(mine / "metrics.jsonl")))
        if (still / "samples.jsonl").exists():
            expected, found = responses(still), responses(mine)
            self._played.compared = len(expected.keys() & found.keys())
            different = [key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)]
            self._played.unequal += [f"step {step}, prompt {prompt}" for step, prompt in sorted(different)]

    def _is_right(self) -> bool:
        played, faults = self._played, self._play.faults
        as_said = zip(played.statuses, self._play.statuses, strict=True)
        heals = 0 in self._play.statuses[-1]
        return (
            all(status in permitted for status, permitted in as_said)
            and not played.left
            and not played.unequal
            and all(row.at is not None and (row.named or not row.must_name) for row in played.rows)
            and all(row.back or not (heals and fault.back) for fault, row in zip(faults, played.rows, strict=True))
        )


def _victim(watch: Watch, hit: Hit) -> int | None:
    """Return the process id of a target, None if it does not exist."""
    if isinstance(hit.target, Kind):
        return watch.victims(hit.target).get(hit.rank)
    found = [one.pid for one in watch.processes() if one.log == hit.target and one.command.startswith("ray::")]
    return found[0] if found else None


def lines(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def responses(run: Path) -> Mapping[tuple[int, int], Sequence[Mapping[str, Any]]]:
    """Return the recorded responses with their rewards, by step and prompt."""
    return {(line["step"], line["prompt_id"]): line["responses"] for line in lines(run / "samples.jsonl")}


def marked(strikes: Path) -> list[psutil.Process]:
    """Return the living processes that a run started, which its environment marks."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(FOLDER) == str(strikes) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def ended(strikes: Path) -> list[str]:
    """Give the processes of a run `GRACE` seconds to end. Describe those that have not, with their ports, and kill
    them.
    """
    limit = time.monotonic() + GRACE
    while (alive := marked(strikes)) and time.monotonic() < limit:
        psutil.wait_procs(alive, timeout=LOOK)
    described = []
    for process in alive:
        with suppress(psutil.Error):
            ports = [one.laddr.port for one in process.net_connections() if one.status == psutil.CONN_LISTEN]
            described.append(f"process {process.pid} {' '.join(process.cmdline())[:80]}, ports {ports}")
            process.kill()
    return described


def left_behind(files: Iterable[Path], drivers: Collection[int]) -> list[Path]:
    """Return the folders of these drivers (`roll-PID-...`), and the files that no process has open or mapped.

    Other programs of this host use the others.
    """
    used = set[int]()
    for process in PROC.glob("[0-9]*"):
        with suppress(OSError):
            lines = (process / "maps").read_text().splitlines()
            used |= {int(line.split(maxsplit=5)[4]) for line in lines if f" {SHARED}/" in line}
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    used.add(descriptor.stat().st_ino)
    found = []
    for file in files:
        with suppress(FileNotFoundError):
            if file.is_dir():
                is_ours = any(file.name.startswith(f"roll-{driver}-") for driver in drivers)
            else:
                is_ours = file.stat().st_ino not in used
            found += [file] if is_ours else []
    return found
