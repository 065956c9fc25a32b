"""Addresses at which no run can join are refused before Ray is asked, and the doctor is told why in one line."""

from __future__ import annotations

import pytest

from roll.workers import survey
from roll.workers.cluster import ClusterUnavailable, join


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265"])
def test_addresses_of_the_client_and_the_dashboard_are_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterUnavailable, match=f"'{address}' is of Ray's client or its dashboard"):
        join()
    with pytest.raises(SystemExit) as ended:
        survey.main()
    assert isinstance(ended.value.code, str) and address in ended.value.code and "\n" not in ended.value.code
