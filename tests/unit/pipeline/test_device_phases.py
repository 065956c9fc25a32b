"""The order of a run's work, against devices that hold one whole role at a time and an engine that may discard its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from roll.pipeline.device_phases import DevicePhases
from roll.workers.device_sharing import ColocatedRole, DeviceSharing, Level

ROLES = ("actor_infer", "actor_train", "reference")


class Devices:
    """Which roles are there; the engine's weights, if it has them."""

    def __init__(self) -> None:
        self.levels: dict[str, Level] = dict.fromkeys(ROLES, Level.AWAY)
        self.engine_has_weights = True
        self.moves = 0

    def colocated(self, role: str) -> ColocatedRole:
        return FakeRole(self, role)


class FakeRole(ColocatedRole):
    """A role on `Devices`."""

    def __init__(self, devices: Devices, role: str) -> None:
        self.devices, self.role = devices, role

    async def offload(self, discard: bool) -> int | None:
        if self.role == "actor_infer" and discard:
            self.devices.engine_has_weights = False
        self.devices.levels[self.role] = Level.AWAY
        self.devices.moves += 1
        return None

    async def onload(self, level: Level) -> None:
        assert self.devices.levels[self.role] < level
        self.devices.levels[self.role] = level
        self.devices.moves += 1
        whole = [role for role, there in self.devices.levels.items() if there is Level.WHOLE]
        assert len(whole) <= 1, f"no room for {whole}"
        assert self.role != "actor_infer" or level is Level.WEIGHTS or self.devices.engine_has_weights


class Work:
    """The pieces of work of a run; each looks whether it finds what it needs."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices

    def _there(self, role: str, level: Level = Level.WHOLE) -> None:
        assert self.devices.levels[role] >= level, role

    async def generate(self) -> None:
        self._there("actor_infer")
        assert self.devices.engine_has_weights

    async def ask(self) -> None:
        self._there("reference")

    async def ask_trainer(self) -> None:
        self._there("actor_train")

    async def train(self) -> None:
        self._there("actor_train")

    async def sync(self) -> None:
        self._there("actor_train")
        self._there("actor_infer", Level.WEIGHTS)
        self.devices.engine_has_weights = True

    async def save(self, folder: Path) -> None:
        self._there("actor_train")

    load = export = save


def shared(roles: Sequence[str]) -> dict[str, set[str]]:
    return {role: {other for other in roles if other != role} for role in roles}


@pytest.mark.parametrize(
    ("resumed", "evaluates", "saves", "reference"), list(product([True, False], [True, False], [True, False], ["", "role", "trainer"]))
)
def test_every_piece_of_work_finds_what_it_needs(resumed: bool, evaluates: bool, saves: bool, reference: str) -> None:
    """The loop's order: sync, evaluate, then take, reference, train, sync, evaluate, save."""

    async def run() -> Devices:
        devices = Devices()
        sharing, work = DeviceSharing(shared(ROLES)), Work(devices)
        for role in ROLES:
            await sharing.enter(role, devices.colocated(role))
        phases = DevicePhases(sharing.bring)
        kept = phases.trainer(work)
        generate, train, sync = phases.generation(work.generate), phases.training(work.train), phases.sync(work.sync)
        asked = {
            "role": phases.reference("reference", work.ask),
            "trainer": phases.reference("actor_train", work.ask_trainer),
        }
        if resumed:
            await kept.load(Path())
        await sync()
        if evaluates:
            await generate()
        for _ in range(2):
            await generate()
            if reference:
                await asked[reference]()
            await train()
            await sync()
            if evaluates:
                await generate()
            if saves:
                await kept.save(Path())
        await kept.export(Path())
        return devices

    devices = asyncio.run(run())
    assert devices.levels["actor_train"] is Level.WHOLE


def test_a_step_moves_no_more_than_it_must() -> None:
    async def run() -> None:
        devices = Devices()
        sharing, work = DeviceSharing(shared(ROLES)), Work(devices)
        for role in ROLES:
            await sharing.enter(role, devices.colocated(role))
        phases = DevicePhases(sharing.bring)
        await phases.sync(work.sync)()
        devices.moves = 0
        await phases.generation(work.generate)()  # trainer out, KV cache in
        assert devices.moves == 2
        await phases.training(work.train)()  # engine out, trainer in
        assert devices.moves == 4
        await phases.sync(work.sync)()  # weights in
        assert devices.moves == 5
        await phases.trainer(work).save(Path())  # the trainer is still there
        assert devices.moves == 5

    asyncio.run(run())


def test_arguments_and_results_go_through() -> None:
    async def double(number: int, plus: int = 0) -> int:
        return 2 * number + plus

    async def run() -> int:
        return await DevicePhases(DeviceSharing({}).bring).generation(double)(4, plus=1)

    assert asyncio.run(run()) == 9
