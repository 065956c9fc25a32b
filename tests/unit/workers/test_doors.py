"""Access to the Ray cluster that a run has started: its own processes can reach it, and strangers are refused."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import grpc
import psutil
import pytest
import ray

from roll.ray.cluster import LOOPBACK, OF_TOKENS, cluster, own_token
from tests import limits

METHODS = {
    "gcs_server": ["/ray.rpc.NodeInfoGcsService/GetClusterId"],
    "raylet": ["/ray.rpc.NodeManagerService/GetNodeStats", "/ray.rpc.ObjectManagerService/Pull"],
    "driver": ["/ray.rpc.CoreWorkerService/GetCoreWorkerStats"],
}
"""RPC methods by process name. Each port of the process implements one of its methods."""


def listening() -> list[tuple[str, str, int]]:
    """Return process name, address and port of every socket on which this process or a descendant listens."""
    ours = psutil.Process()
    names = {child.pid: child.name() for child in ours.children(recursive=True)} | {ours.pid: "driver"}
    found = psutil.net_connections(kind="inet")
    here = [(names[one.pid], one.laddr) for one in found if one.status == psutil.CONN_LISTEN and one.pid in names]
    return [(name, address.ip, address.port) for name, address in here]  # pyright: ignore[reportAttributeAccessIssue]


def blocks_hangups(process: psutil.Process) -> bool:
    """Return whether the process blocks SIGHUP, so that it survives the end of the terminal, or has already ended."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except FileNotFoundError:
        return True
    (blocked,) = re.findall(r"SigBlk:\s*(\w+)", status)
    return bool(int(blocked, 16) >> (signal.SIGHUP - 1) & 1)


def answer(port: int, method: str, token: str | None) -> grpc.StatusCode:
    with grpc.insecure_channel(f"{LOOPBACK}:{port}") as channel:
        known = () if token is None else (("authorization", f"Bearer {token}"),)
        try:
            channel.unary_unary(method)(b"", metadata=known, timeout=limits.CALL)
        except grpc.RpcError as error:
            return error.code()  # pyright: ignore[reportAttributeAccessIssue]
    return grpc.StatusCode.OK


def test_ray_ports_require_token_and_ray_ignores_sighup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = {name: os.environ.get(name) for name in OF_TOKENS}
    others, open_before = set(psutil.Process().children(recursive=True)), set(listening())
    with cluster(tmp_path, gpus=0, gpus_per_node=8):
        assert not [
            child
            for child in psutil.Process().children(recursive=True)
            if child not in others and not blocks_hangups(child)
        ]
        doors = set(listening()) - open_before
        assert {name for name, _, _ in doors} >= METHODS.keys()
        assert {ip.removeprefix("::ffff:") for _, ip, _ in doors} == {LOOPBACK}, doors
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert token.stat().st_mode & 0o077 == 0 and token.parent.stat().st_mode & 0o077 == 0
        gcs = ray.get_runtime_context().gcs_address
        ports = {(name, port) for name, _, port in doors if name in METHODS}
        for name, port in ports:
            for wrong in (None, "", "0" * 64):
                answers = {answer(port, method, wrong) for method in METHODS[name]} - {grpc.StatusCode.UNIMPLEMENTED}
                assert answers == {grpc.StatusCode.UNAUTHENTICATED}, (name, wrong)
        assert answer(int(gcs.rpartition(":")[2]), METHODS["gcs_server"][0], token.read_text()) is grpc.StatusCode.OK
    assert {name: os.environ.get(name) for name in OF_TOKENS} == before
    with socket.socket() as late, pytest.raises(ConnectionRefusedError):
        late.connect((LOOPBACK, int(gcs.rpartition(":")[2])))


def test_the_variables_of_another_cluster_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with own_token(tmp_path):
        assert "RAY_AUTH_TOKEN" not in os.environ and os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ["RAY_AUTH_TOKEN"] == "of another cluster" and "RAY_AUTH_MODE" not in os.environ
