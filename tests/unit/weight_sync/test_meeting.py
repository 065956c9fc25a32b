"""Members of a process group check that they reach each other before gloo or NCCL connects them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from roll.errors import HostUnreachable
from roll.system.addresses import Place
from roll.weight_sync import meeting
from roll.weight_sync.meeting import absent, meet
from roll.weight_sync.routes import MeetingPoint
from roll.weight_sync.store import open_store
from tests import limits
from tests.unit.weight_sync.test_store import free_port


def all_meet(places: Sequence[Place]) -> list[BaseException | None]:
    """Let members with these places meet, and return what each raised."""
    point = MeetingPoint("127.0.0.1", free_port("127.0.0.1"))

    def join(rank: int) -> tuple[object, BaseException | None]:
        store = open_store(point, rank == 0, limits.CALL)
        try:
            meet(store, rank, len(places), limits.CALL, places[rank])
        except Exception as error:
            return store, error
        return store, None

    with ThreadPoolExecutor(len(places)) as threads:
        ended = list(threads.map(join, range(len(places))))  # rank 0's store serves the others until all have ended
    return [error for _, error in ended]


def test_members_that_reach_each_other_meet() -> None:
    assert all_meet([Place("127.0.0.1", "lo"), Place("127.0.0.2", "lo"), Place("127.0.0.2", "lo")]) == [None] * 3


def test_unreached_member_is_named_with_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_listen", lambda rank, place: meeting.listen_at("127.0.0.3", 0))
    errors = all_meet([Place("127.0.0.1", "lo"), Place("127.0.0.2")])
    assert [type(error) for error in errors] == [HostUnreachable] * 2, "all end with the cause, and none waits"
    said = str(errors[1])
    assert all(word in said for word in ("127.0.0.1 (interface lo)", "127.0.0.2", "GLOO_SOCKET_IFNAME"))


def test_place_of_another_host_is_named() -> None:
    with pytest.raises(HostUnreachable, match="192.0.2.7"):
        meet(None, 0, 1, limits.CALL, Place("192.0.2.7"))


def test_missing_member_is_waited_for_and_named() -> None:
    store = open_store(MeetingPoint("127.0.0.1", free_port("127.0.0.1")), True, limits.CALL)
    with pytest.raises(TimeoutError, match="timed out.* 1 "):
        meet(store, 0, 2, limits.NONE, Place("127.0.0.1"))


def test_late_server_is_no_unreached_host() -> None:
    with pytest.raises(TimeoutError, match="timed out"):
        open_store(MeetingPoint("127.0.0.1", free_port("127.0.0.1")), False, limits.NONE)


class CountingStore:
    """A store that counts requests, and the keys in each."""

    def __init__(self, joined: set[int]) -> None:
        self.keys = {f"here {member}" for member in joined}
        self.requests = 0

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return self.keys.issuperset(keys)


def test_absent_members_are_found_in_few_requests() -> None:
    members = range(4096)
    whole = CountingStore(set(members))
    assert absent(whole, members) == [] and whole.requests == 1
    lacking = CountingStore(set(members) - {7, 4095})
    assert absent(lacking, members) == [7, 4095]
    assert lacking.requests <= 4 * 13, "two searches by halves"
