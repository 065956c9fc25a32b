"""Failed starts of Ray: an address that a run cannot join is refused before Ray is called, and Ray's errors get a
remedy.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from roll.ray import survey
from roll.ray.cluster import ClusterUnavailable, join_cluster, start_cluster


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265"])
def test_client_and_dashboard_addresses_are_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterUnavailable, match=f"'{address}' .*client server or dashboard"):
        join_cluster()
    with pytest.raises(SystemExit) as ended:
        survey.main()
    assert isinstance(ended.value.code, str) and address in ended.value.code and "\n" not in ended.value.code


def test_ray_start_failure_is_reported_with_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(**_: object) -> None:
        raise Exception("The current node timed out\n during startup.")

    monkeypatch.setattr(ray, "init", late)
    said = (
        r"^Ray: did not start on this host: The current node timed out during startup\.\n    see Ray's output in "
        r"logs/ray"
    )
    with pytest.raises(ClusterUnavailable, match=said):
        start_cluster(tmp_path, 0)
