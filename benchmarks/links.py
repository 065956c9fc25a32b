"""Measures a broadcast of weights between two hosts over slow links: `python benchmarks/links.py`, as root.

The hosts are namespaces of this machine, joined by a bridge (see tests/hosts/lab.py); gloo sends over TCP.
"""

from __future__ import annotations

import sys
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


def seconds(made: Lab, port: int, mib: int) -> float:
    """Broadcast between the hosts, and return the seconds of the slowest member."""
    head = made.hosts[0].address
    words = ("python", "-m", "benchmarks.broadcast")
    members = [
        host.start(*words, str(rank), str(len(made.hosts)), head, str(port), host.address, str(mib))
        for rank, host in enumerate(made.hosts)
    ]
    said = [member.communicate()[0] for member in members]
    return max(float(text.splitlines()[-1]) for text in said)


def main() -> int:
    """Print a line of a table for each link. Return the exit status."""
    if why := missing():
        print(why, file=sys.stderr)
        return 2
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
