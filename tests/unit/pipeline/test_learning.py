"""Updates of policy and critic in a step: their order, the warm-up of the critic, checkpoints, and shared devices."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.algorithms.losses import Loss, ValueLoss
from roll.algorithms.objectives import PolicyLoss
from roll.config.plan.plan import Plan, are_apart, make_plan
from roll.config.schema.rlvr import RlvrConfig
from roll.data.packing import concatenate
from roll.errors import WorkerFailed
from roll.ray.device_sharing import DeviceSharing, Residency
from roll.runs.checkpointer import OnloadedTrainer
from roll.runs.device_phases import DevicePhases
from roll.runs.position import Position
from roll.runs.rlvr.loop import CriticLearning, Learning
from roll.types import Metrics, TrainBatch

SEQUENCES = concatenate([np.array([1, 2], np.int32)], [np.array([False, True])])
APART = DevicePhases(DeviceSharing({}))
"""Phases of roles that share no devices."""
BATCH = TrainBatch(SEQUENCES, np.zeros(2, np.float32), None, np.zeros(2, np.int32))


class Recorder:
    """Stands in for the updates of policy and critic, and records when each begins and ends."""

    def __init__(self, sharing: int = 1) -> None:
        """Each update yields to the event loop `sharing` times before it ends."""
        self.events: list[Any] = []
        self.turns = sharing

    def names(self) -> list[str]:
        return [event if isinstance(event, str) else event[0] for event in self.events]


@dataclass
class Recorded:
    """A role whose updates are recorded."""

    recorder: Recorder
    name: str

    async def train_step(self, batch: TrainBatch, loss: Loss, policy_version: int) -> Metrics:
        assert batch is BATCH
        self.recorder.events.append((f"{self.name} begins", loss.metric_prefix, policy_version))
        for _ in range(self.recorder.turns):
            await asyncio.sleep(0)
        self.recorder.events.append(f"{self.name} ends")
        return {f"{self.name}/loss": float(policy_version)}


class Failing:
    async def train_step(self, batch: TrainBatch, loss: Loss, policy_version: int) -> Metrics:
        raise WorkerFailed("critic", 0, "no more")


def learning(recorder: Recorder, warmup: int = 0, at_once: bool = False) -> Learning:
    critic = CriticLearning(Recorded(recorder, "critic"), ValueLoss(), warmup, at_once)
    return Learning(APART, Recorded(recorder, "policy"), PolicyLoss(), updates=2, critic=critic)


def test_a_policy_alone() -> None:
    recorder = Recorder()
    metrics, position = asyncio.run(replace(learning(recorder), critic=None).update(BATCH, Position(4, 8)))
    assert recorder.events == [("policy begins", "policy", 8), "policy ends"]
    assert (metrics, position) == ({"policy/loss": 8.0}, Position(5, 10))


def test_on_shared_devices_the_critic_learns_first() -> None:
    recorder = Recorder(sharing=20)
    metrics, position = asyncio.run(learning(recorder).update(BATCH, Position(0, 6)))
    assert recorder.events == [
        ("critic begins", "critic", 6),
        "critic ends",
        ("policy begins", "policy", 6),
        "policy ends",
    ]
    assert metrics == {"critic/loss": 6.0, "policy/loss": 6.0}
    assert position == Position(1, 8)


def test_critic_and_policy_on_separate_devices_learn_concurrently() -> None:
    recorder = Recorder(sharing=20)
    metrics, _ = asyncio.run(learning(recorder, at_once=True).update(BATCH, Position(0, 6)))
    assert recorder.names() == ["critic begins", "policy begins", "critic ends", "policy ends"]
    assert set(metrics) == {"critic/loss", "policy/loss"}


@pytest.mark.parametrize("at_once", [False, True])
def test_policy_version_stays_while_critic_warms_up(at_once: bool) -> None:
    recorder = Recorder()
    learn, position = learning(recorder, warmup=2, at_once=at_once), Position(0, 0)
    versions = []
    for _ in range(4):
        _, position = asyncio.run(learn.update(BATCH, position))
        versions.append(position.policy_version)
    assert versions == [0, 0, 2, 4]
    assert [name for name in recorder.names() if name.endswith("begins")] == ["critic begins"] * 3 + [
        "policy begins"
    ] + ["critic begins", "policy begins"]
    # After a resume, the position alone determines whether the critic still warms up.
    assert asyncio.run(learn.update(BATCH, Position(1, 0)))[1] == Position(2, 0)
    assert asyncio.run(learn.update(BATCH, Position(2, 0)))[1] == Position(3, 2)


@pytest.mark.parametrize("at_once", [False, True])
def test_failure_of_critic_or_policy_ends_update(at_once: bool) -> None:
    recorder = Recorder(sharing=20)
    failing = replace(learning(recorder, at_once=at_once), critic=CriticLearning(Failing(), ValueLoss(), 0, at_once))
    with pytest.raises(WorkerFailed, match="critic rank 0: no more"):
        asyncio.run(failing.update(BATCH, Position(0, 0)))
    assert "policy ends" not in recorder.names()


def test_checkpoint_holds_critic_and_policy_exports_policy(tmp_path: Path) -> None:
    calls: list[tuple[str, Path]] = []

    class Kept:
        def __init__(self, name: str) -> None:
            self.name = name

        async def save(self, folder: Path) -> None:
            calls.append((f"{self.name} saves", folder))

        async def load(self, folder: Path) -> None:
            calls.append((f"{self.name} loads", folder))

        async def export(self, folder: Path) -> None:
            calls.append((f"{self.name} exports", folder))

    policy, critic = Kept("policy"), Kept("critic")
    both = OnloadedTrainer(APART, "actor_train", policy, critic)
    for method in (both.save, both.load, both.export):
        asyncio.run(method(tmp_path))
    apart = tmp_path / "critic"
    assert calls == [
        ("policy saves", tmp_path),
        ("critic saves", apart),
        ("policy loads", tmp_path),
        ("critic loads", apart),
        ("policy exports", tmp_path),
    ]


class FakeRole:
    """A role that records when it is onloaded and offloaded."""

    def __init__(self, name: str, moves: list[str]) -> None:
        self.name, self.moves = name, moves

    async def offload(self, discard: bool) -> int | None:
        self.moves.append(f"{self.name} offloads" + " and discards" * discard)
        return None

    async def onload(self, level: Residency) -> None:
        self.moves.append(f"{self.name} onloads")


def test_on_shared_devices_they_take_turns(tmp_path: Path) -> None:
    """Values, critic update, policy update, sync, checkpoint and next generation each move as few roles as possible."""

    class Kept:
        async def save(self, folder: Path) -> None:
            pass

        load = export = save

    async def run() -> list[str]:
        names = ("actor_infer", "actor_train", "critic")
        moves: list[str] = []
        sharing = DeviceSharing({name: [other for other in names if other != name] for name in names})
        for name in names:
            await sharing.register(name, FakeRole(name, moves))
        phases = DevicePhases(sharing)
        learn = replace(learning(Recorder()), phases=phases)
        await phases.sync()
        await phases.generation()
        moves.clear()
        await phases.scoring("critic")
        await learn.update(BATCH, Position(0, 0))
        await phases.sync()
        await OnloadedTrainer(phases, "actor_train", Kept(), Kept()).save(tmp_path)
        await phases.generation()
        return moves

    assert asyncio.run(run()) == [
        "actor_infer offloads and discards",
        "critic onloads",
        "critic offloads",
        "actor_train onloads",
        "actor_infer onloads",
        "actor_infer offloads",
        "actor_train offloads",
        "critic onloads",
        "critic offloads",
        "actor_infer onloads",
    ]


def plan_of(train: list[int] | None, critic: list[int] | None, infer: list[int] | None) -> Plan:
    """Return a plan with these device mappings."""
    zero = {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": {"stage": 3}}}

    def role(devices: list[int] | None, strategy: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"strategy_args": strategy, **more} | ({"device_mapping": tuple(devices)} if devices else {})

    values = {
        "exp_name": "e",
        "output_dir": "o",
        "pretrain": "nobody/none",
        "max_steps": 2,
        "dry_run": True,
        "adv_estimator": "gae",
        "rewards": {"math_rule": {}},
        "actor_train": role(train, zero, data_args={"file_name": "x", "prompt": "p"}),
        "actor_infer": role(infer, {"strategy_name": "vllm", "strategy_config": {}}),
        "critic": role(critic, zero),
    }
    return make_plan(RlvrConfig.model_validate(values))


@pytest.mark.parametrize(
    ("train", "critic", "apart"),
    [
        ([0, 1], [2, 3], True),
        ([0, 1], [0, 1], False),
        ([0, 1], [1, 2], False),
        (None, None, False),
        ([0, 1], None, True),
    ],
)
def test_they_are_apart_on_devices_of_their_own(train: list[int] | None, critic: list[int] | None, apart: bool) -> None:
    assert are_apart(plan_of(train, critic, train)) is apart


def test_the_critic_takes_turns_as_the_trainer_does() -> None:
    plan = plan_of([0, 1], [0, 1], [0, 1])
    assert plan.turns["critic"] == {"actor_train", "actor_infer"}
    assert plan_of([0, 1], [2, 3], [0, 1]).turns.keys() == {"actor_train", "actor_infer"}
