"""The stores by which the members of a process group find each other."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch import distributed as dist

from roll.weight_sync.routes import MeetingPoint
from roll.weight_sync.store import listen_at, open_store
from tests import limits


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def listening() -> set[tuple[str, int]]:
    """Return the addresses and ports on which this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


def test_members_of_one_host_meet_in_a_file(tmp_path: Path) -> None:
    before, point = listening(), MeetingPoint(file=str(tmp_path / "store"))
    first, second = (open_store(point, host, limits.CALL) for host in (True, False))
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert listening() <= before  # what earlier tests left may end meanwhile


def test_a_server_listens_on_one_address() -> None:
    before, port = listening(), free_port("127.0.0.2")
    point = MeetingPoint("127.0.0.2", port)
    first = open_store(point, True, limits.CALL)
    second = open_store(point, False, limits.CALL)
    second.set("key", "value")
    assert first.get("key") == b"value"
    assert listening() - before == {("127.0.0.2", port)}


@pytest.mark.parametrize("in_file", [True, False])
def test_groups_form_over_both_stores(in_file: bool, tmp_path: Path) -> None:
    point = MeetingPoint(file=str(tmp_path / "s")) if in_file else MeetingPoint("127.0.0.1", free_port("127.0.0.1"))

    def join(rank: int) -> dist.ProcessGroupGloo:
        store = open_store(point, rank == 0, limits.CALL)
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=limits.CALL))

    with ThreadPoolExecutor(2) as threads:
        # Both are held until both have joined: a group that is dropped closes the connection its peer still opens.
        groups = list(threads.map(join, range(2)))
    assert [group.size() for group in groups] == [2, 2]


def test_absent_key_ends_at_the_deadline(tmp_path: Path) -> None:
    store = open_store(MeetingPoint(file=str(tmp_path / "store")), True, limits.EXPIRY)
    with pytest.raises(RuntimeError, match="absent"):
        store.get("absent")


def test_taken_address_is_named() -> None:
    with listen_at("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            listen_at("127.0.0.1", port)
