"""Attacks the kernel's resources from within the sandbox of `code_sandbox`, and reports what a program could take.

    python benchmarks/sandbox_resources.py [--attempts 10] [--seed 0] [--only inodes,pipes]

Each attempt is a program that takes as much of one resource as it can. Attempts differ in the call, its flags, the way
of the call (Python, the C library, machine code, the x32 numbers) and the loop. While a program runs, the host's gauges
are read: kernel slab, open files, inodes, aio contexts and shared memory. The status is 1 if a program took more than
its bound, if a gauge rose by more than its limit in two trials, or if an attempt failed for a reason of its own.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.sandbox_calls import RESOURCES, Resource
from roll.rewards.sandbox.bubblewrap import find_interpreter
from roll.rewards.sandbox.program import Job, Outcome, ProgramLimits, run_program

LIMITS = ProgramLimits(cpu_seconds=2, wall_seconds=30.0, memory_mib=512, disk_mib=16, output_mib=1)
SAMPLING_SECONDS = 0.02
MIB = 1 << 20
RISES = {"slab MiB": 64.0, "files": 2000.0, "inodes": 20_000.0, "aio contexts": 0.0, "shared MiB": 128.0}
"""Largest rise of each gauge. Other processes of the machine may raise all of them a little, except the aio contexts.
"""
PREAMBLE = """
import ctypes, errno, fcntl, mmap, os, random, select, signal, socket, struct, sys, tempfile, threading, time
libc = ctypes.CDLL(None, use_errno=True)
random.seed({seed})
held, kept, WAY = [], [], {way!r}
def words(arguments):
    for part in arguments:
        if isinstance(part, (bytes, bytearray)):
            part = ctypes.create_string_buffer(bytes(part), len(part) + 1)
        if isinstance(part, int):
            yield ctypes.c_long(part)
        else:
            kept.append(part)
            yield ctypes.c_void_p(ctypes.addressof(part))
def checked(result, number):
    if result < 0:
        raise OSError(number, os.strerror(number))
    return result
if WAY == "machine":
    CODE = bytes.fromhex("4889f84889f74889d64889ca4d89c24d89c84c8b4c24080f05c3")
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(CODE)
    machine = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
def call(number, *arguments):
    if WAY == "machine":
        given = [*words(arguments), *[ctypes.c_long(0)] * 6][:6]
        result = machine(ctypes.c_long(number), *given)
        return checked(result, -result)
    number |= 0x40000000 if WAY == "x32" else 0
    result = libc.syscall(ctypes.c_long(number), *words(arguments))
    return checked(result, ctypes.get_errno())
def lib(name, *arguments):
    return checked(getattr(libc, name)(*words(arguments)), ctypes.get_errno())
def runs(work, *numbers):
    # whether the kernel runs a call: it then refuses a descriptor or address that does not exist
    try:
        work()
    except OSError as error:
        if error.errno in numbers:
            return True
        raise
    raise PermissionError(errno.EPERM, "the call does nothing")
SECONDS, MOST, FAILURES = 1.5, {most}, 40
errors, taken, lock = {{}}, [0], threading.Lock()
begun = time.process_time()
{setup}
def take(i):
{body}
def going():
    return taken[0] < MOST and sum(errors.values()) < FAILURES and time.process_time() - begun < SECONDS
def once(i):
    try:
        amount = take(i)
        with lock:
            taken[0] += 1 if amount is None else amount
    except BaseException as error:
        with lock:
            said = type(error).__name__ + " " + str(getattr(error, "errno", None) or error)[:60]
            errors[said] = errors.get(said, 0) + 1
"""
LOOPS = {
    "while": "i = 0\nwhile going():\n    once(i)\n    i += 1\n",
    "threads": (
        "def work(first):\n    i = first * 10**6\n    while going():\n        once(i)\n        i += 1\n"
        "crew = [threading.Thread(target=work, args=(n,)) for n in range(4)]\n"
        "for one in crew: one.start()\nfor one in crew: one.join()\n"
    ),
    "backwards": "for i in range(10**7, 0, -1):\n    if not going(): break\n    once(i)\n",
    "alarm": (
        "i = 0\ndef ring(*_):\n    global i\n    for _ in range(200):\n        if going(): once(i)\n        i += 1\n"
        # Each alarm sets the next: on a slow machine, a timer that repeats interrupts its own handler without end.
        "    signal.setitimer(signal.ITIMER_REAL, 0.001)\n"
        "signal.signal(signal.SIGALRM, ring)\nsignal.setitimer(signal.ITIMER_REAL, 0.001)\n"
        "until = time.monotonic() + 3\nwhile going() and time.monotonic() < until: time.sleep(0.01)\n"
        "signal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
    ),
    "forks first": "try:\n    os.fork(); os.fork()\nexcept OSError:\n    pass\nfor i in range(10**7):\n"
    "    if not going(): break\n    once(i)\n",
}
END = "{measure}\nos.write(1, ('TAKEN %d %r' % (taken[0], errors)).encode())\ntime.sleep(0.1)\nos._exit(0)\n"
BESIDE_THE_POINT = re.compile(
    "NameError|SyntaxError|AttributeError|TypeError|ArgumentError|Indentation|ImportError|RecursionError"
)


@dataclass(frozen=True)
class Attempt:
    """A program that takes as much of a resource as it can."""

    resource: Resource
    how: str
    source: str


@dataclass(frozen=True)
class Trial:
    """What an attempt took."""

    taken: int | None
    """Units of the resource. None if the program was killed before it could tell."""
    errors: str
    rises: dict[str, float]
    """The rise of each gauge while the program ran."""


def attempts_on(resource: Resource, count: int, seed: int) -> list[Attempt]:
    """Return different attempts on a resource, in an order that the seed determines; at least one for each body."""
    chance = random.Random(f"{seed} {resource.name}")
    combined = [
        (body, way, loop)
        for body, way, loop in product(resource.bodies, ("libc", "machine", "x32"), LOOPS)
        if way == "libc" or "call(" in body
    ]
    chance.shuffle(combined)
    first = {body: (body, way, loop) for body, way, loop in combined}
    chosen = [*first.values(), *(one for one in combined if one not in first.values())][: max(count, len(first))]
    return [
        Attempt(resource, f"{way}, {loop}: {body[:50]}", _source(resource, body, way, loop))
        for body, way, loop in chosen
    ]


def _source(resource: Resource, body: str, way: str, loop: str) -> str:
    indented = "\n".join(f"    {line}" for line in body.split("\n"))
    most = max(20 * resource.bound, 5000) if resource.most is None else resource.most
    parts = {"way": way, "seed": 0, "most": most, "setup": resource.setup, "body": indented}
    return PREAMBLE.format(**parts) + LOOPS[loop] + END.format(measure=resource.measure)


def gauges() -> dict[str, float]:
    """Return the gauges of the host by name."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    of_kernel = Path("/proc/sys/fs")
    read = {name: (of_kernel / name).read_text().split() for name in ("file-nr", "inode-nr", "aio-nr")}
    return {
        "slab MiB": int(found["Slab"]) / 1024,
        "files": float(read["file-nr"][0]),
        "inodes": float(read["inode-nr"][0]),
        "aio contexts": float(read["aio-nr"][0]),
        "shared MiB": int(found["Shmem"]) / 1024,
    }


def run(attempt: Attempt) -> Trial:
    """Run an attempt, and read the gauges meanwhile."""
    done, before = threading.Event(), gauges()
    with ThreadPoolExecutor(1) as one:
        highest = one.submit(_highest, done)
        try:
            outcome: Outcome = list(run_program(Job(attempt.source, "input", (b"",)), LIMITS, find_interpreter(None)))[
                0
            ]
        finally:
            done.set()
        peak = highest.result()
    said = re.match(r"TAKEN (\d+) (.*)", outcome.output.decode("utf-8", "replace"))
    rises = {name: peak[name] - value for name, value in before.items()}
    if said is None:
        return Trial(None, f"{outcome.ending.name}: {outcome.note}", rises)
    return Trial(int(said[1]), said[2], rises)


def _highest(done: threading.Event) -> dict[str, float]:
    highest = gauges()
    while not done.wait(SAMPLING_SECONDS):
        highest = {name: max(value, highest[name]) for name, value in gauges().items()}
    return highest


def judged(attempt: Attempt, trial: Trial) -> str:
    """Return why a trial shows a fault of the sandbox or of the attempt. Empty if the resource was bounded."""
    if BESIDE_THE_POINT.search(trial.errors):
        return f"the attempt itself is at fault: {trial.errors}"
    if trial.taken is not None and trial.taken > attempt.resource.bound:
        return f"took {trial.taken}, bound {attempt.resource.bound}"
    allowed = {**RISES, **attempt.resource.rises}
    return "; ".join(f"{name} rose by {rise:.0f}" for name, rise in trial.rises.items() if rise > allowed[name])


def trials(attempts: list[Attempt]) -> Iterator[tuple[Attempt, Trial, str]]:
    """Run each attempt. One that raised a gauge is run twice, as other processes of the machine may have done it."""
    for attempt in attempts:
        trial = run(attempt)
        fault = judged(attempt, trial)
        if " rose by " in fault:
            time.sleep(1)
            trial = run(attempt)
            fault = judged(attempt, trial)
        yield attempt, trial, fault


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=10, help="least number of attempts on each resource")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of resources, separated by commas")
    chosen = parser.parse_args()
    only = chosen.only.split(",") if chosen.only else [resource.name for resource in RESOURCES]
    counts, faults = Counter[str](), 0
    for resource in RESOURCES:
        if resource.name not in only:
            continue
        most, highest, came = 0, dict.fromkeys(RISES, 0.0), 0
        for attempt, trial, fault in trials(attempts_on(resource, chosen.attempts, chosen.seed)):
            counts["killed" if trial.taken is None else "denied" if not trial.taken else "bounded"] += 1
            most, came = max(most, trial.taken or 0), came + 1
            highest = {name: max(highest[name], rise) for name, rise in trial.rises.items()}
            if fault:
                faults += 1
                print(f"  THROUGH {resource.name} ({attempt.how!r}): {fault} [{trial.errors}]", flush=True)
        rises = ", ".join(f"{name} +{rise:.0f}" for name, rise in highest.items() if rise >= 1)
        print(
            f"{resource.name}: {came} attempts, took at most {most} of {resource.bound}; {rises or 'none'}", flush=True
        )
    print(f"{sum(counts.values())} attempts: {dict(counts)}; {faults} got through or failed by themselves")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
