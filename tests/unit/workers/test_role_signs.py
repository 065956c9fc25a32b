"""The progress that is shown for a role, derived from the state of its processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from roll.backend import GenerateStrategy, TrainStrategy
from roll.ray.role_signs import PROBES, WORK, RankState, RoleActivity, common_stage, work_of
from roll.system.signs import Activity, ProcessActivity, Usage


class Machine:
    """An implementation of `Lookers` that returns the stages that a test sets."""

    def __init__(self) -> None:
        self.stages: dict[str, str] = {}
        self.asked: list[tuple[str | None, int | None, int]] = []
        self.messages: list[str | None] = []
        self.is_silent = self.compiles = False

    async def process_activities(
        self, node_id: str | None, asked: Sequence[tuple[int | None, Path, int]]
    ) -> list[ProcessActivity]:
        if self.is_silent:
            raise TimeoutError
        self.messages.append(node_id)
        self.asked += [(node_id, pid, begin) for pid, _, begin in asked]
        return [
            ProcessActivity(self.stages.pop(log.name, None), begin + 10, Usage(1.0, 5), self.compiles)
            for _, log, begin in asked
        ]


class Group:
    """An implementation of `ObservedGroup` with two ranks on two nodes."""

    role = "actor_train"

    def __init__(self) -> None:
        self.is_built, self.work, self.begin = False, None, 100
        self.is_ending = False

    work: str | None

    def states(self) -> Sequence[RankState]:
        ranks = [(7, None), (8, "far")]
        return (
            []
            if self.is_ending
            else [RankState(pid, node, Path(str(pid)), self.begin, self.is_built) for pid, node in ranks]
        )


def test_from_the_process_to_its_work() -> None:
    machine, group = Machine(), Group()
    asked = RoleActivity(machine)

    def sign() -> Activity | None:
        return asyncio.run(asked.of(group, ""))

    assert sign() == Activity("actor_train", "starting its process", Usage(2.0, 10))
    assert machine.asked == [(None, 7, 100), ("far", 8, 100)], "the log of an earlier process is skipped"
    machine.stages = {"7": "loading the model", "8": "started"}
    stages = common_stage(["loading the model", "started"])
    assert "1 of 2" in stages and sign() == Activity("actor_train", stages, Usage(2.0, 10))
    machine.stages = {"8": "loading the model"}
    machine.compiles = True
    assert sign() == Activity("actor_train", "loading the model, compiling", Usage(2.0, 10))
    assert machine.asked[-1] == ("far", 8, 120)
    machine.compiles, group.is_built = False, True
    assert sign() == Activity("actor_train", "ready", Usage(2.0, 10), is_busy=False)
    group.work = "training"
    assert sign() == Activity("actor_train", "training", Usage(2.0, 10))
    group.is_built, group.begin = False, 500
    assert sign() == Activity("actor_train", "starting its process", Usage(2.0, 10)), (
        "a replacement starts from the beginning"
    )
    machine.is_silent = True
    assert sign() == Activity("actor_train", "starting its process"), "a node that does not answer is no error"
    group.is_ending = True
    assert sign() is None


@pytest.mark.parametrize(
    ("stages", "text"), [(["a", "a"], "a"), (["b", "a", "b"], "b (2 of 3 ranks); a (1 of 3 ranks)")]
)
def test_ranks_are_joined(stages: list[str], text: str) -> None:
    assert common_stage(stages) == text


def test_what_is_named_is_a_method() -> None:
    assert {"train_step", "log_probs", "save", "load", "export"} <= WORK.keys() & set(dir(TrainStrategy))
    assert set(dir(GenerateStrategy)) >= PROBES


@pytest.mark.parametrize(
    ("methods", "work"),
    [([], None), (["cause_of_death"], None), (["activity", "generate"], "generating"), (["open_route"], "open route")],
)
def test_probes_are_not_shown_as_work(methods: list[str], work: str | None) -> None:
    assert work_of(methods) == work


def test_each_node_is_asked_once() -> None:
    machine, group = Machine(), Group()
    ranks = [RankState(rank, "far" if rank % 2 else None, Path(str(rank)), 0, True) for rank in range(6)]
    group.states = lambda: ranks
    assert asyncio.run(RoleActivity(machine).of(group, "")) == Activity(
        "actor_train", "ready", Usage(6.0, 30), is_busy=False
    )
    assert machine.messages == [None, "far"]
