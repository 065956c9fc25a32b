"""Measures how long a run takes until its first step, beside the start of vLLM alone.

    python benchmarks/starts.py [--repeat 5] [--folder FOLDER] [--json FILE] [--engine ARGUMENTS] -- ARGUMENTS

`ARGUMENTS` are those of `python -m roll.pipeline`, with an experiment that generates with vLLM. Each repetition runs
the experiment with a new run folder, for two steps, because the last step may be validated, and `LLM(...)` with the
arguments of its engine. Every line of the
run's logs gets the time at which it appeared, so that the table shows when each process entered each stage. Caches of
compilers are warm from the second repetition on; the first one is stated separately.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.system.signs import MARK

POLL = 0.05
"""Seconds between two readings of the logs."""
LIMIT = 900.0
"""Deadline of a run in seconds."""
ALONE = """
import json, sys, time
from vllm import LLM
if __name__ == "__main__":
    LLM(**json.loads(sys.argv[1]))
    print("ready", flush=True)
"""


@dataclass
class Timeline:
    """When each process of a run entered each stage, in seconds since the command."""

    stages: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, name of the log, and stage."""
    first_step: float | None = None
    whole: float = 0.0


def follow(command: Sequence[str], folder: Path, printed: Path) -> Timeline:
    """Run the command and record when its logs change. Raises RuntimeError if it fails or takes too long."""
    found, read = Timeline(), dict[Path, int]()
    begin = time.monotonic()
    with printed.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
        while process.poll() is None:
            now = time.monotonic() - begin
            if now > LIMIT:
                process.terminate()
                raise RuntimeError(f"no end after {LIMIT:.0f} s: {printed}")
            for log in sorted((folder / "logs").glob("*.log")):
                for line in _new_lines(log, read):
                    if MARK in line or log.stem == "driver":
                        found.stages.append((now, log.stem, line.partition(MARK)[2] or line))
            metrics = folder / "metrics.jsonl"
            if found.first_step is None and metrics.is_file() and '"step": 1,' in metrics.read_text():
                found.first_step = now
            time.sleep(POLL)
    found.whole = time.monotonic() - begin
    if process.returncode or found.first_step is None:
        raise RuntimeError(f"status {process.returncode}: {printed.read_text()[-3000:]}")
    return found


def _new_lines(log: Path, read: dict[Path, int]) -> list[str]:
    with log.open("rb") as stream:
        stream.seek(read.get(log, 0))
        text = stream.read()
    whole = text[: text.rfind(b"\n") + 1]
    read[log] = read.get(log, 0) + len(whole)
    return whole.decode(errors="replace").splitlines()


def engine_alone(arguments: dict[str, Any], printed: Path) -> float:
    """Return the seconds until `LLM(**arguments)` is ready in a process of its own."""
    begin = time.monotonic()
    with printed.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", ALONE, json.dumps(arguments)], stdout=subprocess.PIPE, stderr=out
        )
        assert process.stdout is not None
        while line := process.stdout.readline():
            if line == b"ready\n":
                seconds = time.monotonic() - begin
                process.communicate(timeout=60)
                return seconds
    raise RuntimeError(f"status {process.wait()}: {printed.read_text()[-3000:]}")


def main() -> int:
    """Measure, print the table and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("output/benchmark-starts"))
    parser.add_argument("--engine", default="", help="arguments of LLM(...) as JSON; it is not started if empty")
    parser.add_argument("--json", type=Path, help="file for all times")
    parser.add_argument("words", nargs="+", metavar="ARGUMENTS")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    runs, alone = list[Timeline](), list[float]()
    for number in range(options.repeat):
        folder = options.folder.absolute() / f"run-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        words = [*options.words, f"output_dir={folder}", "max_steps=2", "save_at_end=false"]
        runs.append(follow([sys.executable, "-m", "roll.pipeline", *words], folder, options.folder / f"{number}.txt"))
        if options.engine:
            alone.append(engine_alone(json.loads(options.engine), options.folder / f"{number}-alone.txt"))
    report(runs, alone)
    if options.json:
        options.json.write_text(json.dumps({"runs": [vars(run) for run in runs], "alone": alone}))
    return 0


def report(runs: Sequence[Timeline], alone: Sequence[float]) -> None:
    """Print the timeline of the last run, the times of all, and medians without the first."""
    for seconds, process, stage in runs[-1].stages:
        print(f"{seconds:7.1f}  {process:20} {stage[:120]}")
    firsts = [run.first_step or 0.0 for run in runs]
    print("first step after", *(f"{seconds:.1f}" for seconds in firsts), "s; load", *os.getloadavg())
    if len(runs) > 1:
        print(f"median of those with warm caches: {statistics.median(firsts[1:]):.1f} s")
    if alone:
        print("LLM alone after", *(f"{seconds:.1f}" for seconds in alone), "s")
    if len(alone) > 1:
        print(f"first step after LLM alone: {statistics.median(firsts[1:]) - statistics.median(alone[1:]):+.1f} s")


if __name__ == "__main__":
    sys.exit(main())
