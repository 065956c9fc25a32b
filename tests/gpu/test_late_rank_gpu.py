"""A rank that does not come to a collective operation of NCCL is named; the one that waited for it is not blamed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from roll.config.derived.placement import RolePlan
from roll.errors import WorkerFailed
from roll.strategies.base import Rank
from roll.workers.cluster import cluster
from roll.workers.group import WorkerGroup
from roll.workers.placement import worker_placements
from tests import limits
from tests.gpu.conftest import need_devices

pytestmark = pytest.mark.gpu
COLLECTIVE = limits.END
"""Until the operation gives up. The call waits far longer: the watchdog writes down what it saw before it ends its process."""


class Meeting:
    """In the process group that a trainer makes."""

    def __init__(self, rank: Rank) -> None:
        from roll.strategies.deepspeed_setup import join

        join(rank)
        self._rank = rank

    def meet(self, late: int | None) -> float:
        """The sum of a one of each rank; `late` comes when nobody waits any more."""
        if self._rank.rank == late:
            time.sleep(limits.RUN)
        total = torch.ones(1, device=self._rank.device)
        torch.distributed.all_reduce(total)
        return float(total.item())

    def close(self) -> None:
        """Nothing to give back: the processes end."""


@dataclass(frozen=True)
class MeetingSettings:
    """Nothing to set."""

    def build(self, rank: Rank) -> Meeting:
        """See `Settings`."""
        return Meeting(rank)


async def wait_in_vain(folder: Path, devices: tuple[tuple[int, ...], ...]) -> WorkerFailed:
    """Meet once, then once more without the last rank; what is said of it."""
    last = len(devices) - 1
    group: WorkerGroup[Meeting] = WorkerGroup(
        "trainer", worker_placements(RolePlan("trainer", "none", devices), 8, {}), folder / "logs", folder / "held", blocking=True
    )
    try:
        await group.start(MeetingSettings(), COLLECTIVE, limits.START)
        assert await group.within(limits.CALL).all(Meeting.meet, None) == [2.0] * len(devices)
        with pytest.raises(WorkerFailed) as failure:
            await group.within(limits.START).all(Meeting.meet, last)
        return failure.value
    finally:
        await group.stop(limits.EXPIRY)


def test_a_rank_that_stays_away_from_nccl_is_named(tmp_path: Path) -> None:
    need_devices(2)
    with cluster(tmp_path, gpus=2, gpus_per_node=8):
        failure = asyncio.run(wait_in_vain(tmp_path, ((0,), (1,))))
    said = "trainer rank 1: meet: rank(s) 1 did not come to a collective operation for which rank(s) 0 waited (logs/trainer-1.log)"
    assert str(failure) == said, "the operation's own deadline holds: at the call's, both ranks would be late"
