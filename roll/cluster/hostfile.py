"""DeepSpeed's hostfile: one host a line, with its number of GPUs. Pure functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from roll.errors import ConfigError, Fault

LINE = re.compile(r"(?P<name>[A-Za-z0-9_.@-]+)\s+slots=(?P<slots>\d+)")


@dataclass(frozen=True)
class Host:
    """One machine of the cluster."""

    name: str
    """As `ssh` takes it."""
    gpus: int


def parse_hostfile(text: str, source: str) -> list[Host]:
    """The hosts in order; the first becomes the head.

    Raises:
        ConfigError: with every line that cannot be read.
    """
    hosts: list[Host] = []
    faults: list[Fault] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = LINE.fullmatch(line)
        if match is None:
            faults.append(Fault(f"{source}:{number}", f"'{line}' is no host", "write a line as `worker-1 slots=8`"))
        elif match["name"] in {host.name for host in hosts}:
            faults.append(Fault(f"{source}:{number}", f"'{match['name']}' is listed twice", "list each host once, with all of its GPUs"))
        else:
            hosts.append(Host(match["name"], int(match["slots"])))
    if not hosts and not faults:
        faults.append(Fault(source, "it lists no host", "write one line for each host: `worker-1 slots=8`"))
    if len({host.gpus for host in hosts}) > 1:
        counts = ", ".join(f"{host.name} {host.gpus}" for host in hosts)
        faults.append(Fault(source, f"the hosts have different numbers of GPUs: {counts}", "give all the same; devices are counted so"))
    if faults:
        raise ConfigError(faults)
    return hosts
