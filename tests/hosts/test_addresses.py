"""Members of a process group on hosts whose own names resolve to the loopback, as Debian's /etc/hosts has it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests import limits
from tests.hosts.lab import Host, Lab

PORT = "29400"
MIB = "4"


def broadcast(made: Lab, own: list[str], variables: Mapping[str, str]) -> list[str]:
    """Let every host run a member that is told its own address; return what each printed. `variables`: of the last."""
    members = []
    for rank, host in enumerate(made.hosts):
        words = ("python", "-m", "benchmarks.broadcast", str(rank), str(len(made.hosts)), own[0], PORT, own[rank], MIB)
        members.append(host.start(*words, environment=variables if host is made.hosts[-1] else {}))
    return [member.communicate(timeout=limits.CALL)[0] for member in members]


def addresses(hosts: list[Host], version: int) -> list[str]:
    return [host.address if version == 4 else host.address6 for host in hosts]


@pytest.mark.parametrize("version", [4, 6])
def test_members_use_the_given_addresses(version: int, two_hosts: Lab) -> None:
    resolved = two_hosts.hosts[0].run("python", "-S", "-c", "import socket; print(socket.gethostbyname('h1'))")
    assert resolved == "127.0.1.1\n"
    said = broadcast(two_hosts, addresses(two_hosts.hosts, version), {})
    assert all(float(text.splitlines()[-1]) > 0 for text in said), said


def test_wrong_interface_is_told_with_both_ends(two_hosts: Lab) -> None:
    said = broadcast(two_hosts, addresses(two_hosts.hosts, 4), {"GLOO_SOCKET_IFNAME": "docker0"})
    wanted = ("HostUnreachable", "10.77.0.1 (interface eth0)", "172.17.0.1 (interface docker0)", "GLOO_SOCKET_IFNAME")
    assert all(word in text for text in said for word in wanted), said


def test_the_slurm_script_finds_the_heads_address(two_hosts: Lab) -> None:
    first = two_hosts.hosts[0]
    assert first.run("hostname", "--ip-address").split()[0] == "127.0.1.1", "what the script must not use"
    assert first.run("python", "-m", "roll.system.addresses", "10.77.0.2") == "10.77.0.1\n"
    assert "h2: " in first.run("python", "-m", "roll.system.addresses", "h2", check=False)
