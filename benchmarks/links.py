"""Measures a broadcast of weights between two hosts over slow links: `python benchmarks/links.py`, as root.

The hosts are namespaces of this machine, joined by a bridge (see tests/hosts/lab.py); gloo sends over TCP.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.wire import Wire
from tests.hosts.lab import Lab, lab, missing

PORT = 29400
LINKS: tuple[tuple[str, str | None, Wire | None, int], ...] = (
    ("no limit", None, None, 256),
    ("1 Gbit/s", "1gbit", None, 256),
    ("100 Mbit/s", "100mbit", None, 64),
    ("50 ms round trip", None, Wire(delay=0.025), 64),
    ("50 ms, 0.1 % loss", None, Wire(delay=0.025, loss=0.001), 16),
)
"""Name, rate, delay and loss, and MiB to send of each link."""


DEADLINE = 120.0
"""Deadline of a broadcast in seconds."""


def start(made: Lab, port: int, mib: int, deadline: float) -> list[subprocess.Popen[str]]:
    """Start a broadcast from the first host to the others."""
    head, size = made.hosts[0].address, str(len(made.hosts))
    words = ("python", "-m", "benchmarks.broadcast")
    numbers = (str(mib), str(deadline))
    return [
        host.start(*words, str(rank), size, head, str(port), host.address, *numbers)
        for rank, host in enumerate(made.hosts)
    ]


def seconds(made: Lab, port: int, mib: int) -> float:
    """Broadcast between the hosts, and return the seconds of the slowest member."""
    said = [member.communicate()[0] for member in start(made, port, mib, 5 * DEADLINE)]
    return max(float(text.splitlines()[-1]) for text in said)


def cut(made: Lab, pause: float) -> None:
    """Cut the second host off for some seconds."""
    made.cut(made.hosts[1])
    time.sleep(pause)
    made.cut(made.hosts[1], off=False)


def freeze(made: Lab, pause: float) -> None:
    """Stop the second host's processes for some seconds."""
    made.hosts[1].freeze()
    time.sleep(pause)
    made.hosts[1].freeze(still=False)


def die(made: Lab, _: float) -> None:
    """End the second host."""
    made.hosts[1].die()


FAULTS: tuple[tuple[str, Callable[[Lab, float], None], float], ...] = (
    ("host frozen for 10 s", freeze, 10.0),
    ("network cut for 5 s", cut, 5.0),
    ("network cut for 30 s", cut, 30.0),
    ("host died", die, 0.0),
)


def print_faults() -> None:
    """Print a line of a table for each fault amid a broadcast of 64 MiB over 100 Mbit/s."""
    print("| fault | trainer's host | engine's host |\n|---|---|---|")
    for name, fault, pause in FAULTS:
        with lab(2) as made:
            made.limit(made.hosts[1], "100mbit")
            members = start(made, PORT, 64, DEADLINE)
            for member in members:
                assert member.stdout is not None and any(line == "joined\n" for line in member.stdout)
            time.sleep(1)
            fault(made, pause)
            said = [(member.communicate()[0].strip().splitlines() or ["ended"])[-1] for member in members]
            print(f"| {name} | {' | '.join(said)} |", flush=True)


def main() -> int:
    """Print a line of a table for each link, or with the argument `faults` for each fault. Return the exit status."""
    if why := missing():
        print(why, file=sys.stderr)
        return 2
    if sys.argv[1:] == ["faults"]:
        print_faults()
        return 0
    print("| link | sent | seconds | seconds of bytes / rate |\n|---|---|---|---|")
    with lab(2) as made:
        for number, (name, rate, wire, mib) in enumerate(LINKS):
            if wire is not None:
                made.lay(made.hosts[1], wire)
            made.limit(made.hosts[1], rate)
            taken = seconds(made, PORT + number, mib)
            least = f"{8 * mib * (1 << 20) / BITS[rate]:.2f}" if rate else ""
            print(f"| {name} | {mib} MiB | {taken:.2f} | {least} |", flush=True)
    return 0


BITS = {"1gbit": 1e9, "100mbit": 1e8}
"""Bits per second of each rate."""

if __name__ == "__main__":
    sys.exit(main())
