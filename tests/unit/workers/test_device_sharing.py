"""Time sharing of devices: which roles are offloaded and onloaded, and in which order. The roles only record their
calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from roll.errors import WorkerFailed
from roll.ray.device_sharing import ColocatedRole, DeviceSharing, Residency, lines

AWAY, WEIGHTS, WHOLE = Residency
ALL_ON_ONE = {
    "actor_infer": {"actor_train", "reference"},
    "actor_train": {"actor_infer", "reference"},
    "reference": {"actor_infer", "actor_train"},
}
CHAIN = {"actor_infer": {"actor_train"}, "actor_train": {"actor_infer", "reference"}, "reference": {"actor_train"}}
"""actor_train shares devices with both other roles, which share none with each other."""


class Recorder(ColocatedRole):
    """A role that logs the start and the end of each call."""

    def __init__(self, name: str, log: list[str], stays: int | None = None, fails: bool = False) -> None:
        self.name, self.log, self.stays, self.fails = name, log, stays, fails

    async def offload(self, discard: bool) -> int | None:
        await self._do(f"{self.name} {'discards' if discard else 'offloads'}")
        return self.stays

    async def onload(self, level: Residency) -> None:
        await self._do(f"{self.name} onloads {level.name}")

    async def _do(self, what: str) -> None:
        self.log.append(what)
        for _ in range(3):
            await asyncio.sleep(0)
        if self.fails:
            raise WorkerFailed(self.name, 0, "no room")
        self.log.append(f"{what}, done")


async def started(shared: dict[str, set[str]], log: list[str], roles: Iterable[str] = ALL_ON_ONE) -> DeviceSharing:
    """Return a `DeviceSharing` whose roles have all started, with an empty log."""
    sharing = DeviceSharing(shared)
    for role in roles:
        await sharing.register(role, Recorder(role, log, stays=len(role)))
    log.clear()
    return sharing


def asked(log: list[str]) -> list[str]:
    """Return the calls in the log, without their ends."""
    return [line for line in log if not line.endswith("done")]


def test_started_roles_are_discarded_with_resident_bytes_recorded() -> None:
    async def run() -> None:
        log: list[str] = []
        sharing = DeviceSharing(ALL_ON_ONE)
        await sharing.register("actor_infer", Recorder("actor_infer", log, stays=11))
        await sharing.register("reference", Recorder("reference", log))
        assert asked(log) == ["actor_infer discards", "reference discards"]
        assert sharing.resident == {"actor_infer": 11}

    asyncio.run(run())


def test_offloads_precede_onloads() -> None:
    async def run() -> None:
        log: list[str] = []
        sharing = await started(ALL_ON_ONE, log)
        await sharing.bring({"actor_train": WHOLE, "actor_infer": WEIGHTS})
        assert sorted(asked(log)) == ["actor_infer onloads WEIGHTS", "actor_train onloads WHOLE"]
        log.clear()
        await sharing.bring({"actor_infer": WHOLE}, discard={"actor_infer"})
        assert log == [
            "actor_train offloads",
            "actor_train offloads, done",
            "actor_infer onloads WHOLE",
            "actor_infer onloads WHOLE, done",
        ]
        log.clear()
        await sharing.bring({"reference": WHOLE}, discard={"actor_infer"})
        assert asked(log) == ["actor_infer discards", "reference onloads WHOLE"]

    asyncio.run(run())


def test_roles_move_side_by_side() -> None:
    async def run() -> None:
        log: list[str] = []
        sharing = await started(ALL_ON_ONE, log)
        await sharing.bring({"actor_train": WHOLE, "actor_infer": WEIGHTS})
        assert not log[1].endswith("done")
        log.clear()
        await sharing.bring({"reference": WHOLE})
        assert log[:2] == ["actor_infer offloads", "actor_train offloads"]
        assert log[-2:] == ["reference onloads WHOLE", "reference onloads WHOLE, done"]

    asyncio.run(run())


def test_nothing_moves_without_need() -> None:
    async def run() -> None:
        log: list[str] = []
        sharing = await started(ALL_ON_ONE, log)
        await sharing.bring({"actor_train": WHOLE, "actor_infer": WEIGHTS})
        log.clear()
        # All needed roles are present at a sufficient level, so no role is offloaded and no level is lowered.
        for needs in ({"actor_train": WHOLE}, {"actor_infer": WEIGHTS}, {"actor_train": WEIGHTS}, {}):
            await sharing.bring(needs)
        assert log == []

    asyncio.run(run())


def test_roles_that_share_nothing_are_never_asked() -> None:
    async def run() -> None:
        log: list[str] = []
        sharing = DeviceSharing({})
        await sharing.register("actor_infer", Recorder("actor_infer", log))
        await sharing.bring({"actor_infer": WHOLE, "actor_train": WHOLE})
        assert (log, sharing.resident) == ([], {})

    asyncio.run(run())


def test_only_neighbours_leave() -> None:
    async def run() -> None:
        log: list[str] = []
        sharing = await started(CHAIN, log)
        await sharing.bring({"actor_infer": WHOLE})
        await sharing.bring({"reference": WHOLE})
        assert asked(log) == ["actor_infer onloads WHOLE", "reference onloads WHOLE"]
        log.clear()
        await sharing.bring({"actor_train": WHOLE})
        assert asked(log) == ["actor_infer offloads", "reference offloads", "actor_train onloads WHOLE"]

    asyncio.run(run())


def test_make_room_offloads_roles_sharing_restarted_devices() -> None:
    async def run() -> None:
        log: list[str] = []
        sharing = await started(CHAIN, log, CHAIN)
        sharing.ended("actor_train")
        await sharing.make_room(["actor_train"], discard=["actor_infer"])
        assert sorted(asked(log)) == ["actor_infer discards", "reference offloads"]
        log.clear()
        sharing.ended("reference")
        await sharing.make_room(["reference", "rewards.math"], discard=["actor_infer"])
        assert not log, "actor_infer shares no device with it"
        await sharing.register("actor_train", Recorder("actor_train", log))
        await sharing.bring({"actor_train": WHOLE, "actor_infer": WEIGHTS})
        assert asked(log) == ["actor_train discards", "actor_train onloads WHOLE", "actor_infer onloads WEIGHTS"]

    asyncio.run(run())


def test_failed_offload_ends_move_before_onloads() -> None:
    async def run() -> None:
        log: list[str] = []
        sharing = await started(ALL_ON_ONE, log)
        await sharing.bring({"actor_train": WHOLE})
        sharing._colocated["actor_train"] = Recorder("actor_train", log, fails=True)
        log.clear()
        with pytest.raises(WorkerFailed, match="actor_train rank 0: no room"):
            await sharing.bring({"actor_infer": WHOLE})
        assert log == ["actor_train offloads"]
        # The role is still on the device, so the next move tries to offload it again.
        with pytest.raises(WorkerFailed):
            await sharing.bring({"actor_infer": WHOLE})

    asyncio.run(run())


def test_failed_onload_leaves_role_absent() -> None:
    async def run() -> None:
        log: list[str] = []
        sharing = await started(ALL_ON_ONE, log)
        sharing._colocated["actor_train"] = Recorder("actor_train", log, fails=True)
        for _ in range(2):
            with pytest.raises(WorkerFailed):
                await sharing.bring({"actor_train": WHOLE})
        assert log == ["actor_train onloads WHOLE"] * 2

    asyncio.run(run())


def test_roles_on_shared_devices_start_engines_first() -> None:
    roles = ["actor_train", "actor_infer", "reference", "rewards.math"]
    engines, reward = {"actor_infer"}, [["rewards.math"]]
    together = [["actor_infer"], ["actor_train", "reference"]]
    assert lines(roles, ALL_ON_ONE, engines, ()) == [together, reward]
    assert lines(roles, CHAIN, engines, ()) == [together, reward]
    in_turn = [["actor_infer"], ["actor_train"], ["reference"]]
    assert lines(roles, ALL_ON_ONE, engines, ALL_ON_ONE) == [in_turn, reward]
    apart = {"actor_train": {"reference"}, "reference": {"actor_train"}}
    assert lines(roles, apart, engines, ()) == [[["actor_train", "reference"]], [["actor_infer"]], reward]
    assert lines(roles, {}, engines, ()) == [[["actor_train"]], [["actor_infer"]], [["reference"]], reward]
