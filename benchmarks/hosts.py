"""Strikes hosts of a run: `python benchmarks/hosts.py [FAULT ...] [--world FOLDER]`, as root.

The hosts are namespaces of this machine, joined by a bridge (see tests/hosts/lab.py). Each row of the printed table is
one run of the tiny task; without a FAULT, all of them are run. Ray's ranks on the CPU are placed in turn, the first of
each role on the driver's host, which is also Ray's head.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.faults import prepare
from benchmarks.host_runs import STEPS, Fault, Passing, Struck, last_line, strike
from benchmarks.wire import Wire
from tests.hosts.lab import SHARED, WORK, Lab, missing

TRAINER = {"actor_train.world_size": 2}
ENGINE = {"actor_infer.world_size": 2}
WHOLE = {**ENGINE, "weight_sync.lora": "merged", "weight_sync.bucket_mib": 1}
REWARDS = {"rewards.arithmetic.world_size": 2}
EACH = {**TRAINER, **WHOLE, **REWARDS}


def die(made: Lab) -> None:
    """End the second host as a power failure does: no connection is closed."""
    made.cut(made.hosts[1])
    made.hosts[1].die()


def lose_head(made: Lab) -> None:
    """Kill Ray's GCS on the first host, as if another host than the driver's had held it and died."""
    for pid in made.hosts[0].processes():
        if Path(f"/proc/{pid}/comm").read_text().startswith("gcs_server"):
            os.kill(pid, 9)


def cut_head(made: Lab) -> None:
    """Cut off the first host, with Ray's head, for ever."""
    made.cut(made.hosts[0])


def freeze(seconds: float | None) -> Fault:
    """Return a fault that stops the second host's processes for some seconds, None for ever."""

    def fault(made: Lab) -> Passing | None:
        made.hosts[1].freeze()
        return Passing(seconds, lambda: made.hosts[1].freeze(still=False)) if seconds is not None else None

    return fault


def cut(seconds: float) -> Fault:
    """Return a fault that cuts the second host off for some seconds."""

    def fault(made: Lab) -> Passing:
        made.cut(made.hosts[1])
        return Passing(seconds, lambda: made.cut(made.hosts[1], off=False))

    return fault


def fill(number: int) -> Fault:
    """Return a fault that fills the disk of a host, where Ray, compilers and, on the driver's, the run write."""

    def fault(made: Lab) -> None:
        made.hosts[number].run("bash", "-c", "cat /dev/zero > /tmp/filled", check=False)

    return fault


def make_space(made: Lab) -> None:
    """Undo `fill`."""
    for host in made.hosts:
        host.path("/tmp/filled").unlink(missing_ok=True)


def roughen(wire: Wire) -> Fault:
    """Return a fault that makes the second host's wire slow or lossy, from then on."""

    def fault(made: Lab) -> None:
        made.lay(made.hosts[1], wire)

    return fault


def shift_clocks(seconds: int) -> Fault:
    """Return a fault that lets the second host's processes see the time of day some seconds ahead."""

    def fault(made: Lab) -> None:
        there, name = made.hosts[1], "shifted_clock"
        source, library = Path(__file__).with_name(f"{name}.c"), f"{SHARED}/{name}.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", there.path(library), source], check=True)
        there.environment |= {"LD_PRELOAD": library, "CLOCK_SHIFT": str(seconds), "RAY_LD_PRELOAD_ON_WORKERS": "1"}

    return fault


def go_on(made: Lab) -> None:
    """Do nothing, where something was wrong from the start, or is no more."""


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    fault: str
    role: str
    """The role that is hit."""
    overrides: Mapping[str, object]
    strike: Fault
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `strike`."""


SMALL_DISK = {"folder": WORK, "disk": "900m"}
HEAD_BACK = {"driver": 1, "mend": go_on}  # the network is back once what is left was counted
CASES = {
    "death-trainer": Case("host died", "a rank of the trainer", TRAINER, die),
    "death-engine": Case("host died", "an engine, adapter", ENGINE, die),
    "death-whole": Case("host died", "an engine, whole weights", WHOLE, die),
    "death-rewards": Case("host died", "a worker of rewards", REWARDS, die),
    "head": Case("Ray's head died", "none", {**ENGINE, "max_steps": 400}, lose_head),
    "head-cut": Case("Ray's head cut off", "an engine", {**ENGINE, "max_steps": 400}, cut_head, HEAD_BACK),
    "freeze-engine": Case("host frozen for 20 s", "an engine, whole weights", WHOLE, freeze(20)),
    "freeze-trainer": Case("host frozen for 20 s", "a rank of the trainer", TRAINER, freeze(20)),
    "frozen-engine": Case("host frozen for ever", "an engine, whole weights", WHOLE, freeze(None)),
    "frozen-trainer": Case("host frozen for ever", "a rank of the trainer", TRAINER, freeze(None)),
    "cut-5": Case("network cut for 5 s", "an engine, whole weights", WHOLE, cut(5)),
    "cut-30": Case("network cut for 30 s", "an engine, whole weights", WHOLE, cut(30)),
    "cut-30-trainer": Case("network cut for 30 s", "a rank of the trainer", TRAINER, cut(30)),
    "cut-120": Case("network cut for 120 s", "a rank of each role", EACH, cut(120)),
    "cut-300": Case("network cut for 300 s", "an engine, whole weights", WHOLE, cut(300)),
    "cut-300-trainer": Case("network cut for 300 s", "a rank of the trainer", TRAINER, cut(300)),
    "rough": Case(
        "from then on 50 ms round trip, and 0.1 % of the packets lost",
        "a rank of each role",
        EACH,
        roughen(Wire(0.025, 0.001)),
        {"before": roughen(Wire())},
    ),
    "clocks": Case(
        "clock an hour ahead from the start", "a rank of each role", EACH, go_on, {"before": shift_clocks(3600)}
    ),
    "disk": Case("disk full on the other host", "an engine, whole weights", WHOLE, fill(1), SMALL_DISK),
    "disk-driver": Case(
        "disk full on the driver's host", "an engine, whole weights", WHOLE, fill(0), {**SMALL_DISK, "mend": make_space}
    ),
}


def rows(cases: Sequence[Case], struck: Struck) -> list[str]:
    """Return a line of the table for each fault of a run."""
    left = "; ".join(f"{host}: {', '.join(found)}" for host, found in struck.left.items() if found) or "nothing"
    end = "hangs" if struck.status is None else f"ended with {struck.status} after {struck.ended:.0f} s"
    lines = []
    for case, blow in zip(cases, struck.blows, strict=False):  # the run may end before the last one
        trained = "did not train on" if blow.trained is None else f"trained on after {blow.trained:.0f} s"
        noticed = "not said" if blow.noticed is None else f"{blow.noticed:.0f} s"
        parts = (case.fault, case.role, trained, noticed, " / ".join(blow.said), ", ".join(blow.there))
        lines.append(f"| {' | '.join(parts)} |")
    again = [f"| again: {struck.again[0]} | {last_line(struck.again[1])} |"] if struck.again else []
    return [*lines, f"| {end} | {struck.last_line} | left: {left} |", *again]


def main() -> int:
    """Print a line of the table for each case. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", choices=[*CASES, []], metavar="FAULT", help=", ".join(CASES))
    parser.add_argument(
        "--together", action="store_true", help="all on one run, with the keys of all, until it leaves the host"
    )
    parser.add_argument("--world", type=Path, default=Path("output/benchmark-hosts"), help="folder of model and runs")
    given = parser.parse_args()
    if why := missing():
        print(why, file=sys.stderr)
        return 2
    prepare(given.world)
    print("| fault | role hit | outcome | noticed | said | on the host then |\n|---|---|---|---|---|---|", flush=True)
    names = given.faults or list(CASES)
    for together in [names] if given.together else [[name] for name in names]:
        cases, run = [CASES[name] for name in together], f"{together[0]}-{int(time.time())}"
        keys = {"max_steps": STEPS * len(cases)} | {
            key: value for case in cases for key, value in case.overrides.items()
        }
        faults = [case.strike for case in cases]
        struck = strike(given.world.absolute(), run, keys, faults, **cases[0].options)
        (given.world / f"{run}.txt").write_text("\n".join([*struck.said, *(struck.again[1] if struck.again else ())]))
        print("\n".join(rows(cases, struck)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
