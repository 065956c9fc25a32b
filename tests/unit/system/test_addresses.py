"""Which network interface gloo, NCCL and vLLM are told to use, and what a user's own variables change."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from roll.system import addresses
from roll.system.addresses import (
    Place,
    address_towards,
    interface_of,
    listening_place,
    no_interface,
    own_interfaces,
    socket_variables,
)

HOST = {
    "lo": ("127.0.0.1", "::1"),
    "docker0": ("172.17.0.1",),
    "eth0": ("10.77.0.1", "fd77::1", "fe80::1"),
    "eth1": ("192.168.0.4", "10.99.0.4"),
}


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("10.77.0.1", "eth0"),
        ("fd77:0::1", "eth0"),
        ("10.99.0.4", "eth1"),
        ("127.0.0.2", "lo"),
        ("34.1.2.3", None),
    ],
)
def test_interface_is_the_one_with_the_address(address: str, interface: str | None) -> None:
    assert interface_of(address, HOST) == interface


def test_gloo_nccl_and_vllm_get_the_address() -> None:
    assert socket_variables("10.77.0.1", HOST, {}) == {
        "ROLL_NODE_ADDRESS": "10.77.0.1",
        "VLLM_HOST_IP": "10.77.0.1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
    }


def test_nccl_speaks_ipv6_where_ray_does() -> None:
    assert socket_variables("fd77::1", HOST, {})["NCCL_SOCKET_FAMILY"] == "AF_INET6"


def test_a_users_own_interface_stays() -> None:
    own = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "^docker0"}
    assert not set(own) & set(socket_variables("10.77.0.1", HOST, own))


def test_nccls_own_file_stays_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nccl.conf").write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=eth1\n")
    monkeypatch.setattr(addresses, "NCCL_FILES", (tmp_path / "nccl.conf", tmp_path / "absent"))
    found = socket_variables("10.77.0.1", HOST, {})
    assert "NCCL_SOCKET_IFNAME" not in found
    assert found["GLOO_SOCKET_IFNAME"] == "eth0"


def test_address_of_no_interface_is_warned_about() -> None:
    found = socket_variables("34.1.2.3", HOST, {})
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & set(found)
    warning = no_interface("34.1.2.3", HOST)
    assert all(word in warning for word in ("34.1.2.3", "eth0 10.77.0.1", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"))


@pytest.mark.parametrize(
    ("on_gpu", "variables", "place"),
    [
        (False, {"GLOO_SOCKET_IFNAME": "eth1"}, Place("192.168.0.4", "eth1")),
        (True, {"NCCL_SOCKET_IFNAME": "=eth0"}, Place("10.77.0.1", "eth0")),
        (True, {"NCCL_SOCKET_IFNAME": "^lo,docker"}, Place("10.77.0.1", "eth0")),
        (True, {"NCCL_SOCKET_IFNAME": "eth1", "ROLL_NODE_ADDRESS": "10.99.0.4"}, Place("10.99.0.4", "eth1")),
        (True, {"ROLL_NODE_ADDRESS": "34.1.2.3"}, Place("34.1.2.3")),
    ],
)
def test_listening_place_follows_the_variables(on_gpu: bool, variables: dict[str, str], place: Place) -> None:
    assert listening_place(on_gpu, HOST, variables) == place


def test_gloo_without_variable_follows_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert listening_place(False, HOST, {}) == Place("127.0.1.1")


def test_own_loopback_is_found() -> None:
    assert any("127.0.0.1" in listed for listed in own_interfaces().values())
    assert address_towards("127.0.0.1") == "127.0.0.1"
