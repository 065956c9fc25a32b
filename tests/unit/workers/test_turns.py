"""Who leaves and who comes, in which order, with roles that only write down what is asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from roll.errors import WorkerFailed
from roll.workers.turns import Level, Tenant, Turns, lines

AWAY, WEIGHTS, WHOLE = Level
ALL_ON_ONE = {
    "actor_infer": {"actor_train", "reference"},
    "actor_train": {"actor_infer", "reference"},
    "reference": {"actor_infer", "actor_train"},
}
CHAIN = {"actor_infer": {"actor_train"}, "actor_train": {"actor_infer", "reference"}, "reference": {"actor_train"}}
"""actor_train lies over both others, which do not meet."""


class Recorder(Tenant):
    """Notes what it is asked, when it began and when it was done."""

    def __init__(self, name: str, log: list[str], stays: int | None = None, fails: bool = False) -> None:
        self.name, self.log, self.stays, self.fails = name, log, stays, fails

    async def leave(self, forget: bool) -> int | None:
        await self._do(f"{self.name} {'forgets' if forget else 'leaves'}")
        return self.stays

    async def come(self, level: Level) -> None:
        await self._do(f"{self.name} comes {level.name}")

    async def _do(self, what: str) -> None:
        self.log.append(what)
        for _ in range(3):
            await asyncio.sleep(0)
        if self.fails:
            raise WorkerFailed(self.name, 0, "no room")
        self.log.append(f"{what}, done")


async def started(shared: dict[str, set[str]], log: list[str], roles: Iterable[str] = ALL_ON_ONE) -> Turns:
    """Turns whose roles have all started; the log begins afterwards."""
    turns = Turns(shared)
    for role in roles:
        await turns.enter(role, Recorder(role, log, stays=len(role)))
    log.clear()
    return turns


def asked(log: list[str]) -> list[str]:
    """What was asked, without the ends."""
    return [line for line in log if not line.endswith("done")]


def test_a_role_that_starts_makes_room_for_the_next_and_what_stays_is_known() -> None:
    async def run() -> None:
        log: list[str] = []
        turns = Turns(ALL_ON_ONE)
        await turns.enter("actor_infer", Recorder("actor_infer", log, stays=11))
        await turns.enter("reference", Recorder("reference", log))
        assert asked(log) == ["actor_infer forgets", "reference forgets"]
        assert turns.resident == {"actor_infer": 11}

    asyncio.run(run())


def test_those_in_the_way_leave_before_those_needed_come() -> None:
    async def run() -> None:
        log: list[str] = []
        turns = await started(ALL_ON_ONE, log)
        await turns.bring({"actor_train": WHOLE, "actor_infer": WEIGHTS})
        assert sorted(asked(log)) == ["actor_infer comes WEIGHTS", "actor_train comes WHOLE"]
        log.clear()
        await turns.bring({"actor_infer": WHOLE}, forget={"actor_infer"})
        assert log == ["actor_train leaves", "actor_train leaves, done", "actor_infer comes WHOLE", "actor_infer comes WHOLE, done"]
        log.clear()
        await turns.bring({"reference": WHOLE}, forget={"actor_infer"})
        assert asked(log) == ["actor_infer forgets", "reference comes WHOLE"]

    asyncio.run(run())


def test_roles_move_side_by_side() -> None:
    async def run() -> None:
        log: list[str] = []
        turns = await started(ALL_ON_ONE, log)
        await turns.bring({"actor_train": WHOLE, "actor_infer": WEIGHTS})
        assert not log[1].endswith("done")
        log.clear()
        await turns.bring({"reference": WHOLE})
        assert log[:2] == ["actor_infer leaves", "actor_train leaves"]
        assert log[-2:] == ["reference comes WHOLE", "reference comes WHOLE, done"]

    asyncio.run(run())


def test_nothing_moves_without_need() -> None:
    async def run() -> None:
        log: list[str] = []
        turns = await started(ALL_ON_ONE, log)
        await turns.bring({"actor_train": WHOLE, "actor_infer": WEIGHTS})
        log.clear()
        # Everything needed is there: even those not needed stay, and no level is lowered.
        for needs in ({"actor_train": WHOLE}, {"actor_infer": WEIGHTS}, {"actor_train": WEIGHTS}, {}):
            await turns.bring(needs)
        assert log == []

    asyncio.run(run())


def test_roles_that_share_nothing_are_never_asked() -> None:
    async def run() -> None:
        log: list[str] = []
        turns = Turns({})
        await turns.enter("actor_infer", Recorder("actor_infer", log))
        await turns.bring({"actor_infer": WHOLE, "actor_train": WHOLE})
        assert (log, turns.resident) == ([], {})

    asyncio.run(run())


def test_only_neighbours_leave() -> None:
    async def run() -> None:
        log: list[str] = []
        turns = await started(CHAIN, log)
        await turns.bring({"actor_infer": WHOLE})
        await turns.bring({"reference": WHOLE})
        assert asked(log) == ["actor_infer comes WHOLE", "reference comes WHOLE"]
        log.clear()
        await turns.bring({"actor_train": WHOLE})
        assert asked(log) == ["actor_infer leaves", "reference leaves", "actor_train comes WHOLE"]

    asyncio.run(run())


def test_a_role_that_cannot_leave_ends_the_move_and_nobody_comes() -> None:
    async def run() -> None:
        log: list[str] = []
        turns = await started(ALL_ON_ONE, log)
        await turns.bring({"actor_train": WHOLE})
        turns._tenants["actor_train"] = Recorder("actor_train", log, fails=True)
        log.clear()
        with pytest.raises(WorkerFailed, match="actor_train rank 0: no room"):
            await turns.bring({"actor_infer": WHOLE})
        assert log == ["actor_train leaves"]
        # It is still there, and is asked to leave again.
        with pytest.raises(WorkerFailed):
            await turns.bring({"actor_infer": WHOLE})

    asyncio.run(run())


def test_a_role_that_cannot_come_is_not_taken_to_be_there() -> None:
    async def run() -> None:
        log: list[str] = []
        turns = await started(ALL_ON_ONE, log)
        turns._tenants["actor_train"] = Recorder("actor_train", log, fails=True)
        for _ in range(2):
            with pytest.raises(WorkerFailed):
                await turns.bring({"actor_train": WHOLE})
        assert log == ["actor_train comes WHOLE"] * 2

    asyncio.run(run())


def test_roles_of_shared_devices_start_in_a_line_engines_first() -> None:
    roles = ["actor_train", "actor_infer", "reference", "rewards.math"]
    assert lines(roles, ALL_ON_ONE, {"actor_infer"}) == [["actor_infer", "actor_train", "reference"], ["rewards.math"]]
    assert lines(roles, CHAIN, {"actor_infer"}) == [["actor_infer", "actor_train", "reference"], ["rewards.math"]]
    apart = {"actor_train": {"reference"}, "reference": {"actor_train"}}
    assert lines(roles, apart, {"actor_infer"}) == [["actor_train", "reference"], ["actor_infer"], ["rewards.math"]]
    assert lines(roles, {}, {"actor_infer"}) == [["actor_train"], ["actor_infer"], ["reference"], ["rewards.math"]]
