"""Runs that outlive a host, and leave nothing on the others. `benchmarks/hosts.py` has the whole table."""

from __future__ import annotations

import warnings

import pytest

from benchmarks.host_runs import strike
from benchmarks.hosts import CASES
from tests.hosts.lab import missing
from tests.integration.conftest import World

pytestmark = [pytest.mark.engines, pytest.mark.full]


@pytest.mark.parametrize(("name", "role"), [("death-whole", "actor_infer"), ("death-trainer", "actor_train")])
def test_runs_outlive_a_host(world: World, name: str, role: str) -> None:
    if why := missing():
        warnings.warn(f"NO RUN OVER SEVERAL HOSTS WAS TESTED: {why}", stacklevel=1)
        pytest.skip(f"no run over several hosts was tested: {why}")
    struck = strike(world.folder, name, CASES[name].overrides, CASES[name].strike)
    said = "\n".join(struck.said)
    assert struck.status == 0, said
    assert f"{role} rank 1" in said and "10.77.0.2" in said, said
    assert not any(struck.left.values()), struck.left
