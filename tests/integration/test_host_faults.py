"""Runs that outlive a host, and leave nothing on the others. `benchmarks/hosts.py` has the whole table."""

from __future__ import annotations

import pytest

from benchmarks.host_runs import strike
from benchmarks.hosts import CASES
from tests.hosts.skipping import skip_without_hosts
from tests.integration.conftest import World

pytestmark = [pytest.mark.engines, pytest.mark.full]


@pytest.mark.parametrize(("name", "role"), [("death-whole", "actor_infer"), ("death-trainer", "actor_train")])
def test_runs_outlive_a_host(world: World, name: str, role: str) -> None:
    skip_without_hosts()
    struck = strike(world.folder, name, CASES[name].overrides, [CASES[name].strike])
    said = "\n".join(struck.said)
    assert struck.status == 0, said
    assert f"{role} rank 1" in said and "10.77.0.2" in said, said
    assert not any(struck.left.values()), struck.left
