"""The lease of a store: one holder at a time, taken over from a holder that has ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from roll.errors import CheckpointError
from roll.stores import lease
from roll.stores.lease import LEASE, Holder, Lease
from roll.stores.store import Store
from tests import limits


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(lease, "BEAT", limits.LOOK)
    monkeypatch.setattr(lease, "SETTLE", limits.LOOK)
    return Store(tmp_path.as_uri())


def test_a_lease_is_given_back(store: Store) -> None:
    with Lease(store) as held:
        assert LEASE in store.sizes()
        held.check()
    assert store.sizes() == {}


def test_a_living_holder_keeps_others_out(store: Store) -> None:
    with Lease(store), pytest.raises(CheckpointError, match="another run"):
        Lease(store).__enter__()


def test_a_clock_that_is_set_ends_no_lease(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with Lease(store):
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 0.0)  # Linux adds the difference to the boot
        with pytest.raises(CheckpointError, match="another run"):
            Lease(store).__enter__()


def test_lease_of_silent_host_is_taken_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "GONE", limits.EXPIRY)
    elsewhere = replace(Holder.of_this_process(), machine="another", host="far")
    store.write(LEASE, elsewhere.encode())
    assert not elsewhere.is_dead
    with Lease(store) as held:
        held.check()


def test_dead_process_of_this_host_loses_its_lease(store: Store) -> None:
    dead = replace(Holder.of_this_process(), born=0.0)
    store.write(LEASE, dead.encode())
    with Lease(store) as held:
        held.check()


def test_a_holder_notices_that_it_was_replaced(store: Store) -> None:
    with Lease(store) as held:
        usurper = replace(Holder.of_this_process(), host="far")

        def is_noticed() -> bool:
            store.write(LEASE, usurper.encode())
            try:
                held.check()
            except CheckpointError as error:
                return "far" in str(error)
            return False

        limits.until(is_noticed, "the holder has seen the other's lease")
    assert Holder.decode(store.read(LEASE)) == usurper, "the other's lease is left alone"
