"""The addresses of this host's network interfaces, and the variables that make gloo and NCCL use one of them.

Without a variable gloo listens at the address that the host's own name resolves to, which is often an address of the
loopback (Debian and Ubuntu write `127.0.1.1 NAME` into /etc/hosts), and NCCL at the first interface that is up, which
may be Docker's. Other hosts reach neither. Ray's address of the node is one that they reach.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import psutil

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Variables that choose the interfaces of gloo and of NCCL."""
NCCL_FAMILY = "NCCL_SOCKET_FAMILY"
NODE = "ROLL_NODE_ADDRESS"
"""Variable of a worker's processes: Ray's address of its node."""
VLLM = "VLLM_HOST_IP"
"""Variable with the address at which vLLM's processes meet. Otherwise vLLM asks the route to the internet."""
NCCL_FILES = (Path("/etc/nccl.conf"), Path.home() / ".nccl.conf")
"""Files in which NCCL reads its variables. The environment would take precedence over them."""
KEYS = f"`system_envs: {{{GLOO}: NAME, {NCCL}: NAME}}`"
"""What to set, for messages."""
ANY_PORT = 9
"""Port to which a socket is connected without sending anything."""

Interfaces = Mapping[str, Sequence[str]]
"""Addresses of each interface by name, IPv4 first."""


@dataclass(frozen=True)
class Place:
    """Where a process listens for the other members of a process group."""

    address: str
    interface: str = ""
    """Empty if no variable chooses one."""

    def __str__(self) -> str:
        return f"{self.address} (interface {self.interface})" if self.interface else self.address


def own_interfaces() -> dict[str, tuple[str, ...]]:
    """Return the addresses of this host's interfaces that are up."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {
        name: tuple(one.address.partition("%")[0] for one in listed if one.family in (socket.AF_INET, socket.AF_INET6))
        for name, listed in psutil.net_if_addrs().items()
        if name in up
    }


def interface_of(address: str, interfaces: Interfaces) -> str | None:
    """Return the interface that holds an address, None if none does. The loopback holds all of 127.0.0.0/8."""
    wanted = ip_address(address)
    for name, listed in interfaces.items():
        held = [ip_address(one) for one in listed]
        if wanted in held or (wanted.is_loopback and any(one.is_loopback for one in held)):
            return name
    return None


def chosen_interfaces(filter_text: str, names: Collection[str]) -> list[str]:
    """Return the names that NCCL's filter selects: by prefix, by name (`=`), or by exclusion (`^`)."""
    words = filter_text.lstrip("^=").split(",")
    whole = "=" in filter_text[:2]

    def listed(name: str) -> bool:
        return any(name == word if whole else name.startswith(word) for word in words)

    return [name for name in names if listed(name) != filter_text.startswith("^")]


def socket_variables(address: str, interfaces: Interfaces, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which gloo, NCCL and vLLM use a node's address. A variable that is set stays as it is.

    Without an interface that holds the address, as behind a translation of addresses, gloo and NCCL choose themselves.
    """
    found = {NODE: address, VLLM: address}
    if name := interface_of(address, interfaces):
        found |= {GLOO: name} | ({} if _in_files(NCCL) else {NCCL: f"={name}"})
        if ":" in address:
            found[NCCL_FAMILY] = "AF_INET6"
    return {variable: value for variable, value in found.items() if variable == NODE or variable not in environment}


def _in_files(variable: str) -> bool:
    """Return whether one of NCCL's files sets a variable."""
    files = [path for path in NCCL_FILES if path.is_file()]
    return any(re.search(rf"^\s*{variable}\s*=", path.read_text(errors="replace"), re.MULTILINE) for path in files)


def no_interface(address: str, interfaces: Interfaces) -> str:
    """Return the warning for a node whose address no interface holds, with the key to set."""
    held = "; ".join(f"{name} {', '.join(listed)}" for name, listed in interfaces.items())
    return (
        f"no network interface of the host holds its address in the Ray cluster, {address} (it has {held}), so gloo "
        f"and NCCL choose one themselves; if the ranks do not reach each other, start Ray with --node-ip-address, or "
        f"set {KEYS} to the interface that the other hosts reach"
    )


def listening_place(on_gpu: bool, interfaces: Interfaces, environment: Mapping[str, str]) -> Place:
    """Return where NCCL (`on_gpu`) or gloo will listen in a process with these variables."""
    given = environment.get(NCCL if on_gpu else GLOO, "")
    names = chosen_interfaces(given, list(interfaces)) if on_gpu and given else [given]
    for name in names:
        if listed := interfaces.get(name):
            node = environment.get(NODE, "")
            return Place(node if on_gpu and node in listed else listed[0], name)
    return Place(_named_address() if not on_gpu else environment.get(NODE) or _named_address())


def _named_address() -> str:
    """Return the address that the host's own name resolves to."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def address_towards(host: str) -> str:
    """Return the address of this host from which another host, a name or an address, is reached. Sends nothing.

    Raises:
        OSError: the name cannot be resolved, or there is no route to it.
    """
    family, kind, _, _, peer = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])


def main() -> int:
    """`python -m roll.system.addresses HOST`: print `address_towards` a host. Exit status 1 if there is none."""
    try:
        print(address_towards(sys.argv[1]))
    except OSError as error:
        print(f"{sys.argv[1]}: {error}", file=sys.stderr)
        return 1
    return 0


def use_node_address(address: str) -> None:
    """Set this process's variables so that what it loads uses the node's address in the Ray cluster."""
    os.environ |= socket_variables(address, own_interfaces(), os.environ)


if __name__ == "__main__":
    sys.exit(main())
