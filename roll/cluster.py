"""`python -m roll.cluster HOSTFILE [start|stop] [--run]`: print or run the commands that start a Ray cluster on the
hosts of a hostfile.

Exit status: 0 done; 2 the hostfile cannot be used; 3 a host could not be reached, or Ray did not start there.

Parses DeepSpeed's hostfile, which has one host per line with its number of GPUs. Pure functions.

Builds the commands that start and stop a Ray cluster. Pure functions.
"""

from __future__ import annotations

import argparse
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from ipaddress import AddressValueError, IPv6Address, ip_address
from pathlib import Path, PurePosixPath

from roll.errors import ConfigError, Fault, RollError

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
    """Return the hosts in order, the head first. Raises ConfigError with every line that cannot be parsed."""
    hosts: list[Host] = []
    faults: list[Fault] = []
    for number, line in enumerate(text.splitlines(), 1):
        line, place = line.partition("#")[0].strip(), f"{source}:{number}"
        match = LINE.fullmatch(line)
        if not line:
            continue
        if match is None:
            faults.append(
                Fault(place, f"'{line}' is not a host", "write each line like `worker-1 slots=8`", "malformed")
            )
        elif not _is_name(match["name"]):
            remedy = "give a name or an address that `ssh` accepts; set a port in ~/.ssh/config"
            faults.append(Fault(place, f"'{match['name']}' is not a valid host name", remedy, "malformed"))
        elif match["name"].rpartition("@")[2] in {host.address for host in hosts}:
            faults.append(
                Fault(
                    place,
                    f"'{match['name']}' is listed twice",
                    "list each host once, with all of its GPUs",
                    "duplicate",
                )
            )
        else:
            hosts.append(Host(match["name"], int(match["slots"])))
    if not hosts and not faults:
        faults.append(
            Fault(source, "it lists no hosts", "write one line for each host, such as `worker-1 slots=8`", "empty")
        )
    if faults:
        raise ConfigError(*faults)
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
            remedy = f"name hosts ({', '.join(sizes)}), and slots below their number, such as `worker-1:0,1`"
            faults.append(Fault(option, f"'{word}' is not in the hostfile", remedy, "unknown_name"))
        else:
            named.setdefault(name, set()).update(map(int, slots))
    left = [_left(host, named.get(host.address, set()), bool(include)) for host in hosts] if spec else list(hosts)
    left = [host for host in left if host.gpus]
    counts = ", ".join(f"{host.name} {host.gpus}" for host in left)
    if not left:
        faults.append(Fault(option, "no GPU is left", "select at least one GPU", "empty"))
    if len({host.gpus for host in left}) > 1:
        remedy = (
            "device_mapping needs the same number of GPUs on each host: change slots in the hostfile, or use --include"
        )
        faults.append(Fault("hostfile", f"the hosts have different numbers of GPUs: {counts}", remedy, "contradiction"))
    if faults:
        raise ConfigError(*faults)
    return left


def _left(host: Host, named: set[int], included: bool) -> Host:
    slots = tuple(slot for slot in range(host.gpus) if (slot in named) == included)
    return host if len(slots) == host.gpus else replace(host, gpus=len(slots), slots=slots)


ENVIRONMENT = ("env", "RAY_AUTH_MODE=token", "RAY_worker_niceness=0")
"""Variables for Ray. The cluster can be reached by others, so it requires a token, which is in the same file on every
host. The niceness keeps workers and their engines from running at a lower priority than other processes, as they would
by default.
"""
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


@dataclass(frozen=True)
class Command:
    """One command on one host."""

    host: str
    words: tuple[str, ...]

    @property
    def over_ssh(self) -> list[str]:
        """Words of the local command that runs this command on its host."""
        return [*SSH, self.host, shlex.join(self.words)]

    def __str__(self) -> str:
        return shlex.join(self.over_ssh)


def address(head: Host, port: int) -> str:
    """Return the address at which the cluster can be joined."""
    return f"[{head.address}]:{port}" if ":" in head.address else f"{head.address}:{port}"


def start_commands(
    hosts: Sequence[Host], port: int, ray: PurePosixPath, find: Callable[[str], str | None] = lambda _: None
) -> list[Command]:
    """Return the commands that start the head and then the other nodes. `ray` is the program's path on every host.

    Each node is told its address, if it is known: what a host's own name resolves to may be reached by no other host.
    `find` returns the address of a name.
    """
    head, *others = hosts
    return [
        _start(head, ray, "--head", f"--port={port}", *_own_address(head, find)),
        *(_start(host, ray, f"--address={address(head, port)}", *_own_address(host, find)) for host in others),
    ]


def _own_address(host: Host, find: Callable[[str], str | None]) -> list[str]:
    known = host.address if _is_address(host.address) else find(host.address)
    return [f"--node-ip-address={known}"] if known else []


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        return False


def find_address(name: str) -> str | None:
    """Return the address by which this host knows another, or itself, by name; None if others may not reach it."""
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return None  # a name that only ssh knows
    return None if any(ip_address(one.partition("%")[0]).is_loopback for one in found) else found[0]


def _start(host: Host, ray: PurePosixPath, *place: str) -> Command:
    seen = () if host.slots is None else (f"CUDA_VISIBLE_DEVICES={','.join(map(str, host.slots))}",)
    return Command(
        host.name, (*ENVIRONMENT, *seen, str(ray), "start", "--disable-usage-stats", *place, f"--num-gpus={host.gpus}")
    )


def stop_commands(hosts: Sequence[Host], ray: PurePosixPath) -> list[Command]:
    """Return the commands that stop every node, the head last."""
    return [Command(host.name, (str(ray), "stop", "--grace-period=30")) for host in reversed(hosts)]


def join_words(hosts: Sequence[Host], port: int) -> str:
    """Return the environment variables with which a run joins the cluster, as words of a shell command."""
    return f"RAY_AUTH_MODE=token RAY_ADDRESS={address(hosts[0], port)}"


SECONDS = 120.0
"""Deadline for one host, in seconds."""


BY_HAND = "leave out --run, and run each printed command on its host"
CHOSEN = "use --include or --exclude to choose hosts and GPUs, and device_mapping to assign the GPUs to roles"
OTHER_FLAGS = {
    "--num_gpus": CHOSEN,
    "--num_nodes": CHOSEN,
    "--no_ssh": BY_HAND,
    "--node_rank": BY_HAND,
    "--launcher": BY_HAND,
    "--master_addr": "remove it: the first host of the hostfile is the head",
    "--master_port": "use --port",
    "--hostfile": "give the hostfile without a flag: python -m roll.cluster HOSTFILE",
}
"""Flags of DeepSpeed's launcher, and what to do instead."""


class HostFailed(RollError):
    """A command failed on a host."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print or run the commands. Return the exit status."""
    arguments, rest = cluster_parser().parse_known_args(argv)
    try:
        if faults := [_no_flag(word) for word in rest]:
            raise ConfigError(*faults)
        hosts = filter_hosts(
            parse_hostfile(_read(arguments.hostfile), str(arguments.hostfile)), arguments.include, arguments.exclude
        )
        start = arguments.action == "start"
        commands = (
            start_commands(hosts, arguments.port, arguments.ray, find_address)
            if start
            else stop_commands(hosts, arguments.ray)
        )
        for number, command in enumerate(commands):
            print(command, flush=True)
            if arguments.run and (failure := run_on_host(command)):
                ended = _end(stop_commands(hosts[:number], arguments.ray)) if start else ""
                raise HostFailed(failure + ended)
        if start:
            print(
                f"then, on {hosts[0].name}: {join_words(hosts, arguments.port)} python -m roll.pipeline --config-name "
                f"..."
            )
    except RollError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


def cluster_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    found = argparse.ArgumentParser(
        "python -m roll.cluster", description="Start a Ray cluster on the hosts of a DeepSpeed hostfile."
    )
    found.add_argument("hostfile", type=Path, help="lines such as `worker-1 slots=8`; the first host becomes the head")
    found.add_argument("action", nargs="?", choices=("start", "stop"), default="start")
    found.add_argument(
        "--run",
        action="store_true",
        help="run the commands over ssh, without a password, instead of only printing them",
    )
    some = found.add_mutually_exclusive_group()
    some.add_argument("--include", help="use only these hosts, or these of their GPUs: worker-1@worker-2:0,1")
    some.add_argument("--exclude", help="use all hosts and GPUs except these")
    found.add_argument("--port", type=int, default=6379, help="port of the head")
    found.add_argument(
        "--ray",
        type=PurePosixPath,
        default=PurePosixPath(sys.executable).with_name("ray"),
        help="path of the program `ray` on the hosts",
    )
    return found


def _no_flag(word: str) -> Fault:
    flag = word.partition("=")[0]
    return Fault(
        flag,
        "is not a flag of this command",
        OTHER_FLAGS.get(flag.replace("-", "_").replace("__", "--", 1), "see --help"),
        "unknown_key",
    )


def run_on_host(command: Command) -> str | None:
    """Run a command on its host with the deadline `SECONDS`. Return why it failed, None if it succeeded."""
    try:
        done = subprocess.run(command.over_ssh, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"{command.host}: did not finish within {SECONDS:.0f} s: {command}"
    except FileNotFoundError:
        return (
            f"{command.host}: `ssh` is not installed here; install it, or run on that host: {shlex.join(command.words)}"
        )
    if not done.returncode:
        return None
    said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
    return f"{command.host}: exit status {done.returncode}: {said}; run it by hand: {command}"


def _end(commands: Sequence[Command]) -> str:
    """Stop the hosts that have started, so that no partial cluster remains. Return a text about it for a message."""
    failures = [failure for command in commands if (failure := run_on_host(command))]
    if failures:
        return "; some hosts that had started could not be stopped: " + "; ".join(failures)
    return f"; stopped again: {', '.join(command.host for command in commands)}" if commands else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            Fault(
                "hostfile", f"'{path}' cannot be read: {error}", "give the path of a DeepSpeed hostfile", "unreadable"
            )
        ) from error


if __name__ == "__main__":
    sys.exit(main())
