"""A rank that does not join an NCCL collective is named in the error, and the rank that waited for it is not blamed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from roll.backend import Rank
from roll.config.derived.placement import RolePlan
from roll.errors import WorkerFailed
from roll.ray.cluster import cluster
from roll.ray.group import WorkerGroup
from roll.ray.placement import worker_placements
from tests import limits
from tests.gpu.conftest import need_devices

pytestmark = pytest.mark.gpu
COLLECTIVE = limits.END
"""Timeout of the collective, in seconds. The call's deadline is longer: the watchdog writes its report before it ends
the process.
"""


class Meeting:
    """A strategy that joins the process group that a trainer would create."""

    def __init__(self, rank: Rank) -> None:
        from roll.training.deepspeed.setup import join_process_group

        join_process_group(rank)
        self._rank = rank

    def meet(self, late: int | None) -> float:
        """All-reduce a one from each rank and return the sum. The rank `late` joins only after the collective's
        timeout.
        """
        if self._rank.rank == late:
            time.sleep(limits.RUN)
        total = torch.ones(1, device=self._rank.device)
        torch.distributed.all_reduce(total)
        return float(total.item())

    def close(self) -> None:
        """Do nothing: the process ends anyway."""


@dataclass(frozen=True)
class MeetingSettings:
    """The settings of `Meeting`, which has none."""

    def build(self, rank: Rank) -> Meeting:
        """See `Settings`."""
        return Meeting(rank)


async def wait_in_vain(folder: Path, devices: tuple[tuple[int, ...], ...]) -> WorkerFailed:
    """Meet once with all ranks and once without the last rank. Return the error of the second meeting."""
    last = len(devices) - 1
    group: WorkerGroup[Meeting] = WorkerGroup(
        "trainer",
        worker_placements(RolePlan("trainer", "none", devices), 8, {}),
        folder / "logs",
        folder / "held",
        blocking=True,
    )
    try:
        await group.start(MeetingSettings(), COLLECTIVE, limits.START)
        assert await group.within(limits.CALL).all(Meeting.meet, None) == [2.0] * len(devices)
        with pytest.raises(WorkerFailed) as failure:
            await group.within(limits.START).all(Meeting.meet, last)
        return failure.value
    finally:
        await group.stop(limits.EXPIRY)


def test_rank_absent_from_nccl_collective_is_named(tmp_path: Path) -> None:
    need_devices(2)
    with cluster(tmp_path, gpus=2, gpus_per_node=8):
        failure = asyncio.run(wait_in_vain(tmp_path, ((0,), (1,))))
    assert str(failure).startswith("trainer rank 1: meet: ")
    assert str(failure).endswith("rank(s) 0 waited (logs/trainer-1.log)"), (
        "the collective's timeout must end the wait: at the call's deadline, both ranks would be late"
    )
