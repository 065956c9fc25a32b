"""Parses DeepSpeed's hostfile, which has one host per line with its number of GPUs. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import AddressValueError, IPv6Address

from roll.errors import ConfigError, Fault

LINE = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>[1-9]\d*)(\s+max_slots=\d+)?")
"""A line of a hostfile. `max_slots` is from Open MPI's hostfiles, which DeepSpeed also reads."""
NAME = re.compile(r"(\w[\w.-]*@)?\w[\w.-]*")


@dataclass(frozen=True)
class Host:
    """One machine of the cluster."""

    name: str
    """Name of the host for `ssh`."""
    gpus: int
    slots: tuple[int, ...] | None = None
    """Numbers of the GPUs that the cluster may use, None for all."""

    @property
    def address(self) -> str:
        """The name without the user for `ssh`."""
        return self.name.rpartition("@")[2]


def parse_hostfile(text: str, source: str) -> list[Host]:
    """Return the hosts in order. The first becomes the head.

    Raises:
        ConfigError: lines cannot be parsed, or there are no hosts. The error lists every faulty line.
    """
    hosts: list[Host] = []
    faults: list[Fault] = []
    for number, line in enumerate(text.splitlines(), 1):
        line, place = line.partition("#")[0].strip(), f"{source}:{number}"
        match = LINE.fullmatch(line)
        if not line:
            continue
        if match is None:
            faults.append(Fault(place, f"'{line}' is not a host", "write each line like `worker-1 slots=8`"))
        elif not _is_name(match["name"]):
            remedy = "give a name or an address that `ssh` accepts; set a port in ~/.ssh/config"
            faults.append(Fault(place, f"'{match['name']}' is not a valid host name", remedy))
        elif match["name"].rpartition("@")[2] in {host.address for host in hosts}:
            faults.append(
                Fault(place, f"'{match['name']}' is listed twice", "list each host once, with all of its GPUs")
            )
        else:
            hosts.append(Host(match["name"], int(match["slots"])))
    if not hosts and not faults:
        faults.append(Fault(source, "it lists no hosts", "write one line for each host, such as `worker-1 slots=8`"))
    if faults:
        raise ConfigError(faults)
    return hosts


def _is_name(name: str) -> bool:
    try:
        return bool(NAME.fullmatch(name)) or bool(IPv6Address(name.rpartition("@")[2]))
    except AddressValueError:
        return False


def filter_hosts(hosts: Sequence[Host], include: str | None, exclude: str | None) -> list[Host]:
    """Return the hosts and GPUs that are left after DeepSpeed's `--include` or `--exclude`.

    The options have the format `NAME[:SLOT[,SLOT ...]]`, joined by `@`. At most one of them is given.

    Raises:
        ConfigError: a name or a slot is not in the hostfile, or the selected hosts have no GPUs or different numbers of
            GPUs.
    """
    option, spec = ("--include", include) if include else ("--exclude", exclude or "")
    named: dict[str, set[int]] = {}
    faults: list[Fault] = []
    sizes = {host.address: host.gpus for host in hosts}
    for word in filter(None, spec.split("@")):
        name, _, listed = (word, "", "") if word in sizes else word.rpartition(":")
        slots = set(listed.split(",")) if listed else {str(slot) for slot in range(sizes.get(name, 0))}
        if not slots or not slots <= {str(slot) for slot in range(sizes.get(name, 0))}:
            remedy = (
                f"name hosts of the hostfile ({', '.join(sizes)}), and slots from 0 to their number minus 1, such as "
                f"`worker-1:0,1`"
            )
            faults.append(Fault(option, f"'{word}' is not in the hostfile", remedy))
        else:
            named.setdefault(name, set()).update(map(int, slots))
    left = [_left(host, named.get(host.address, set()), bool(include)) for host in hosts] if spec else list(hosts)
    left = [host for host in left if host.gpus]
    counts = ", ".join(f"{host.name} {host.gpus}" for host in left)
    if not left:
        faults.append(Fault(option, "no GPU is left", "select at least one GPU"))
    if len({host.gpus for host in left}) > 1:
        remedy = (
            "device_mapping needs the same number of GPUs on each host: change slots in the hostfile, or use --include"
        )
        faults.append(Fault("hostfile", f"the hosts have different numbers of GPUs: {counts}", remedy))
    if faults:
        raise ConfigError(faults)
    return left


def _left(host: Host, named: set[int], included: bool) -> Host:
    slots = tuple(slot for slot in range(host.gpus) if (slot in named) == included)
    return host if len(slots) == host.gpus else replace(host, gpus=len(slots), slots=slots)
