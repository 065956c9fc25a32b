"""Trains the tiny task on cores with other busy processes, to check that slow processes are not taken for dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.fault_runs import ALARM, World
from benchmarks.fault_watch import Course

LOOPS_PER_CORE = 2
LOOP = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
END = 600.0
"""Seconds in which an interrupted run must finish the current step, write the checkpoint and end."""


@contextmanager
def busy() -> Iterator[int]:
    """Run `LOOPS_PER_CORE` busy processes on each core until the context exits. Yield their number."""
    cores = sorted(os.sched_getaffinity(0)) * LOOPS_PER_CORE
    loops = [subprocess.Popen([sys.executable, "-c", LOOP, str(core)]) for core in cores]
    try:
        yield len(loops)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def train(world: World, minutes: float) -> int:
    """Train for some minutes and report false alarms. Return 0 if there were none and the run ended in order."""
    name = "busy"
    extensions = world.folder / f"{name}.extensions"
    world = replace(world, steps=1_000_000)
    began = time.time()
    with busy() as loops:
        process = world.start(name, 1, {"TORCH_EXTENSIONS_DIR": str(extensions)})
        try:
            status = process.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            status = process.wait(END)
        finally:
            process.kill()
    course = Course(Path(world.folder / name))
    course.look()
    alarms = [line.text for line in course.lines if line.at > began and ALARM.search(line.text)]
    print(f"{(time.time() - began) / 60:.1f} minutes with {loops} busy processes: {course.step} steps, status {status}")
    print(f"false alarms: {len(alarms)}", *alarms, sep="\n")
    return 0 if status == 128 + signal.SIGINT and not alarms and course.step > 0 else 1
