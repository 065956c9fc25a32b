"""The RLVR loop on devices that hold only one fully onloaded role at a time, with an engine that may discard its
weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from roll.algorithms.advantages import Normalisation
from roll.algorithms.losses import Loss
from roll.algorithms.objectives import PolicyLoss
from roll.ray.device_sharing import ColocatedRole, DeviceSharing, Residency
from roll.rollout.batch import Credit, CreditAssignment, Shaping
from roll.rollout.reference import ReferenceAtOnce
from roll.runs.checkpointer import OnloadedTrainer
from roll.runs.device_phases import DevicePhases
from roll.runs.position import Position
from roll.runs.rlvr import loop as rlvr
from roll.runs.rlvr.loop import Learning
from roll.types import Floats, Metrics, RolloutGroup, Sequences, TrainBatch
from tests.unit.rollout.build import make_episode, make_group

ROLES = ("actor_infer", "actor_train", "reference")


class Devices:
    """Shared devices: the level to which each role is onloaded, and whether the engine has weights."""

    def __init__(self) -> None:
        self.levels: dict[str, Residency] = dict.fromkeys(ROLES, Residency.AWAY)
        self.engine_has_weights = True
        self.moves = 0

    def colocated(self, role: str) -> ColocatedRole:
        return FakeRole(self, role)


class FakeRole(ColocatedRole):
    """A role on `Devices`. Checks that no two roles are fully onloaded at the same time."""

    def __init__(self, devices: Devices, role: str) -> None:
        self.devices, self.role = devices, role

    async def offload(self, discard: bool) -> int | None:
        if self.role == "actor_infer" and discard:
            self.devices.engine_has_weights = False
        self.devices.levels[self.role] = Residency.AWAY
        self.devices.moves += 1
        return None

    async def onload(self, level: Residency) -> None:
        assert self.devices.levels[self.role] < level
        self.devices.levels[self.role] = level
        self.devices.moves += 1
        whole = [role for role, there in self.devices.levels.items() if there is Residency.WHOLE]
        assert len(whole) <= 1, f"the devices have no room for {whole} at the same time"
        assert self.role != "actor_infer" or level is Residency.WEIGHTS or self.devices.engine_has_weights


class Work:
    """Stands in for the parts of the loop. Each part checks that its roles are onloaded, and records the number of
    moves so far.
    """

    def __init__(self, devices: Devices, phases: DevicePhases, evaluates: bool = False, saves: bool = False) -> None:
        self.devices, self.phases, self.evaluates, self.saves = devices, phases, evaluates, saves
        self.kept = OnloadedTrainer(phases, "actor_train", self)
        self.moves: list[tuple[str, int]] = []

    name = "nowhere"

    def _finds(self, role: str, work: str, level: Residency = Residency.WHOLE) -> None:
        assert self.devices.levels[role] >= level, f"{work} needs {role}"
        self.moves.append((work, self.devices.moves))

    async def take(self) -> list[RolloutGroup]:
        self._finds("actor_infer", "take")
        assert self.devices.engine_has_weights
        return [make_group(0, [make_episode([3, 4], 0.0), make_episode([5, 6], 1.0)])]

    async def ref_log_probs(self, sequences: Sequences) -> Floats:
        self._finds("reference", "reference")
        return np.zeros(len(sequences.token_ids), np.float32)

    async def log_probs(self, sequences: Sequences) -> Floats:
        self._finds("actor_train", "log_probs")
        return np.zeros(len(sequences.token_ids), np.float32)

    async def train_step(self, batch: TrainBatch, loss: Loss, policy_version: int) -> Metrics:
        self._finds("actor_train", "train")
        return {}

    async def push(self, version: int) -> None:
        self._finds("actor_train", "sync")
        self._finds("actor_infer", "sync", Residency.WEIGHTS)
        self.devices.engine_has_weights = True

    def generating(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def after(self, step: int) -> Metrics:
        if self.evaluates:
            await self.phases.generation()
            self._finds("actor_infer", "evaluate")
            assert self.devices.engine_has_weights
        return {}

    def part(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    async def step(self, groups: Sequence[RolloutGroup]) -> Metrics:
        return {}

    def happened(self) -> bool:
        return False

    stopped_early = ""

    def observe(self, step: int, metrics: Metrics) -> None:
        """Take the metrics, as a checkpointer that follows none."""

    async def save_if_due(self, position: Position) -> None:
        if self.saves:
            await self.kept.save(Path())

    async def save(self, folder: Path) -> None:
        self._finds("actor_train", "checkpoint")

    load = export = save

    def log(self, step: int, metrics: Metrics) -> None:
        pass

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        pass

    def close(self) -> None:
        pass


def shared(roles: Sequence[str]) -> dict[str, set[str]]:
    return {role: {other for other in roles if other != role} for role in roles}


async def run(work: Work, reference: str, steps: int, resumed: bool = False, own_log_probs: bool = False) -> None:
    """Run the loop from the start, or from a checkpoint of step 1, and export the model."""
    if resumed:
        await work.kept.load(Path())
    asked = {"": None, "role": ReferenceAtOnce(work.ref_log_probs), "trainer": ReferenceAtOnce(work.log_probs)}[
        reference
    ]
    stand_in = cast(Any, work)
    parts = rlvr.Rlvr(
        phases=work.phases,
        meter=stand_in,
        scheduler=stand_in,
        engines=stand_in,
        trainer=stand_in,
        needs_log_probs=own_log_probs,
        reference=asked,
        reference_role="reference" if reference == "role" else "actor_train",
        critic=None,
        teachers=None,
        self_teacher=None,
        learning=Learning(work.phases, work, PolicyLoss(), updates=1),
        validation=stand_in,
        checkpointer=stand_in,
        interrupt=stand_in,
        tracker=work,
        shaping=Shaping(),
        credit=CreditAssignment(Credit("grpo", Normalisation())),
        max_steps=steps + resumed,
    )
    await rlvr.train_rlvr(parts, Position(int(resumed), int(resumed)))
    await work.kept.export(Path())


async def started(evaluates: bool = False, saves: bool = False) -> Work:
    """Start all roles one after the other. Each is offloaded before the next one starts."""
    devices, sharing = Devices(), DeviceSharing(shared(ROLES))
    for role in ROLES:
        await sharing.register(role, devices.colocated(role))
    return Work(devices, DevicePhases(sharing), evaluates, saves)


@pytest.mark.parametrize(
    ("resumed", "evaluates", "saves", "reference", "own_log_probs"),
    list(product([True, False], [True, False], [True, False], ["", "role", "trainer"], [True, False])),
)
def test_every_piece_of_work_finds_what_it_needs(
    resumed: bool, evaluates: bool, saves: bool, reference: str, own_log_probs: bool
) -> None:
    async def whole() -> Work:
        work = await started(evaluates, saves)
        await run(work, reference, 2, resumed, own_log_probs)
        return work

    work = asyncio.run(whole())
    assert work.devices.levels["actor_train"] is Residency.WHOLE
    assert [name for name, _ in work.moves].count("train") == 2


def test_a_step_moves_no_more_than_it_must() -> None:
    async def whole() -> list[tuple[str, int]]:
        work = await started(saves=True)
        before = work.devices.moves
        await run(work, "", 1)
        return [(name, moves - before) for name, moves in work.moves]

    assert asyncio.run(whole()) == [
        ("sync", 2),  # onload the trainer and the engine's weights
        ("sync", 2),
        ("take", 4),  # offload the trainer, onload the KV cache
        ("train", 6),  # offload the engine, onload the trainer
        ("sync", 7),  # onload the engine's weights
        ("sync", 7),
        ("checkpoint", 7),  # the trainer is still onloaded
        ("checkpoint", 7),
    ]


class PausedWork(Work):
    """Roles stay on the devices. Generation ahead of training is paused for the roles that use the engine's devices."""

    def __init__(self, pausing_for: Collection[str]) -> None:
        devices = Devices()
        devices.levels = dict.fromkeys(ROLES, Residency.WHOLE)
        super().__init__(
            devices, DevicePhases(DeviceSharing({}), engines=self, pausing_for=pausing_for), evaluates=True, saves=True
        )
        self.pausing_for, self.paused, self.seen = set(pausing_for), False, []

    async def pause(self) -> None:
        self.paused = True

    def _finds(self, role: str, work: str, level: Residency = Residency.WHOLE) -> None:
        if work in ("take", "evaluate"):
            assert not self.paused, f"generation is paused during {work}"
        elif work not in ("sync", "checkpoint"):
            assert self.paused >= (role in self.pausing_for), (
                f"{work} would run while the engine generates on the same devices"
            )
        self.seen.append((work, self.paused))

    async def push(self, version: int) -> None:
        await super().push(version)
        self.paused = False


@pytest.mark.parametrize("pausing_for", [(), ("actor_train",), ("actor_train", "reference")])
def test_generation_is_paused_until_the_next_weight_sync(
    pausing_for: tuple[str, ...],
) -> None:
    work = PausedWork(pausing_for)
    asyncio.run(run(work, "role", 2))
    expected = [("take", False), ("reference", "reference" in pausing_for), ("train", "actor_train" in pausing_for)]
    assert [one for one in work.seen if one[0] in ("take", "reference", "train")] == expected * 2
