"""Measures the silences on the screen from the start of a run to its first step.

    python benchmarks/first_hour.py [--terminal] [--busy 2] [--json FILE] [KEY=VALUE ...]

Runs two steps of the tiny task (model and problems are created in a temporary folder) and records the time of each line
until the first step. A sign is a line that begins with a role and differs from that role's previous line. `--terminal`
connects the run to a terminal of 80 columns instead of a pipe; `--busy N` also starts N busy processes. The exit status
is 1 if the first sign or any later one is late.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "examples" / "tiny"
FIRST_SECONDS, SILENT_SECONDS = 2.0, 5.0
"""Largest allowed seconds until the first sign, and between two signs."""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
SIGN = re.compile(
    r"^(driver|actor_\w+|reference|critic|teacher|student|\w+_train|(?:rewards|environments)\.\w+): (\S.*)"
)
FIRST_STEP = re.compile(r"\bstep 1/")
SPIN = "while True: pass"


@dataclass(frozen=True)
class Sign:
    """A new or changed line on the screen."""

    second: float
    """Seconds since the command's start."""
    text: str


@dataclass(frozen=True)
class Course:
    """The signs of a run until its first step."""

    first_output: float
    signs: Sequence[Sign]
    first_step: float

    @property
    def silences(self) -> list[tuple[float, float, str]]:
        """Return the length and the start of each silence, in seconds, and the sign before it; the longest silence
        first.
        """
        moments = [*((sign.second, sign.text) for sign in self.signs), (self.first_step, "")]
        if not self.signs:
            moments.insert(0, (self.first_output, "no sign at all"))
        gaps = [(later[0] - earlier[0], *earlier) for earlier, later in zip(moments, moments[1:], strict=False)]
        return sorted(gaps, reverse=True)


def main() -> int:
    """Run, print the findings, and return 1 if a sign was late."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terminal", action="store_true")
    parser.add_argument("--columns", type=int, default=80, help="width of the terminal")
    parser.add_argument("--busy", type=int, default=0, metavar="PROCESSES", help="number of busy processes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", type=Path, help="file for the output of the run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-hour-") as scratch:
        command = prepared(Path(scratch), options.overrides)
        with busy(options.busy):
            course, shown = run(command, Path(scratch), options.columns if options.terminal else None)
    if options.record:
        options.record.write_text(shown)
    first = course.signs[0].second if course.signs else float("inf")
    worst, since, text = course.silences[0]
    print(
        f"first output after {course.first_output:.1f} s, first sign after {first:.1f} s, first step after "
        f"{course.first_step:.1f} s"
    )
    print(f"{len(course.signs)} signs; the longest silence is {worst:.1f} s, from second {since:.1f} on, after: {text}")
    if options.json:
        found = {"first_output": course.first_output, "first_step": course.first_step, "longest_silence": worst}
        options.json.write_text(
            json.dumps(found | {"signs": [[sign.second, sign.text] for sign in course.signs]}, indent=1)
        )
    return int(first > FIRST_SECONDS or worst > SILENT_SECONDS)


def prepared(folder: Path, overrides: Sequence[str]) -> list[str]:
    """Create model and problems of the tiny task. Return the command of a run of two steps."""
    for script, name in (("make_model.py", "model"), ("make_problems.py", "problems")):
        subprocess.run(
            [sys.executable, str(TINY / script), f"output/tiny/{name}"],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    usual = ["output_dir=run", "pretrain=output/tiny/model", "max_steps=2", "save_at_end=false"]
    return [sys.executable, "-m", "roll.pipeline", "--config-name", "tiny/tiny_rlvr_lora_zero3", *usual, *overrides]


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run busy processes until the context exits."""
    with ExitStack() as stack:
        for _ in range(processes):
            process = subprocess.Popen([sys.executable, "-c", SPIN])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def run(command: Sequence[str], folder: Path, columns: int | None) -> tuple[Course, str]:
    """Run the command to its end, in a terminal with `columns` columns if given. Return the signs and the whole output.

    Raises:
        SystemExit: the run failed, or completed no step.
    """
    reader, writer = pty.openpty() if columns else os.pipe()
    if columns:
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    began = time.monotonic()
    environment = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=writer if columns else subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        env=environment,
    )
    os.close(writer)
    chunks = list[tuple[float, str]]()
    with open(reader, "rb", buffering=0) as stream:
        try:
            while chunk := stream.read(1 << 16):
                chunks.append((time.monotonic() - began, chunk.decode(errors="replace")))
        except OSError:  # the other side of a pseudo-terminal is closed
            pass
    status = process.wait()
    shown = "".join(text for _, text in chunks)
    course = course_of(chunks)
    if status or course is None:
        raise SystemExit(f"the run ended with status {status}:\n{shown}")
    return course, shown


def course_of(chunks: Sequence[tuple[float, str]]) -> Course | None:
    """Return the signs until the first step. None if there was no step.

    Args:
        chunks: parts of the output, each with the second of its arrival.
    """
    signs, latest = list[Sign](), dict[str, str]()
    rest = ""
    for second, chunk in chunks:
        *lines, rest = re.split(r"[\r\n]+", rest + chunk)
        for line in [*lines, rest]:
            plain = ESCAPES.sub("", line).strip(" │|")
            if FIRST_STEP.search(plain):
                return Course(chunks[0][0], signs, second)
            if (found := SIGN.match(plain)) and latest.get(found[1]) != plain:
                latest[found[1]] = plain
                signs.append(Sign(second, plain))
    return None


if __name__ == "__main__":
    sys.exit(main())
