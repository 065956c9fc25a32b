"""The failures after which the trainer's side is restarted, and the step from which the run then continues."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.plan import Plan
from roll.config.schema.pipelines import Config
from roll.errors import (
    BadInput,
    EngineShortage,
    Fault,
    RollError,
    WorkerAbandoned,
    WorkerDied,
    WorkerFailed,
    WorkerLate,
)
from roll.ray.cluster import ClusterSession
from roll.runs import assemble
from roll.runs import assemble as restarts
from roll.runs.assemble import BACK_OFF_SECONDS, Restarts
from roll.runs.checkpoint.store import CheckpointStore
from roll.runs.checkpointer import Checkpointer
from roll.runs.interrupt import Interrupt
from roll.runs.position import Position
from roll.runs.run_context import RunContext
from roll.system.restart_budget import HOUR
from tests import limits
from tests.quiet import quiet_life
from tests.unit.pipeline.test_checkpointer import Trainer

LOST = WorkerDied("actor_train", 1, "its process 7 is stopped (SIGSTOP)")


def test_the_wait_before_a_restart_grows() -> None:
    counted = Restarts(5)
    assert [counted.wait_after(LOST, step) for step in range(4)] == [*BACK_OFF_SECONDS, BACK_OFF_SECONDS[-1]]
    assert counted.count == 4


def test_distant_losses_do_not_lengthen_the_back_off() -> None:
    now = 0.0
    counted = Restarts(5, lambda: now)
    waited = []
    for seconds in (0.0, HOUR / 2, HOUR, HOUR, HOUR / 4):
        now += seconds
        waited.append(counted.wait_after(LOST, int(now)))
    first, second, _ = BACK_OFF_SECONDS
    assert waited == [first, second, first, first, second]


@pytest.mark.parametrize("role", ["actor_train", "critic", "reference", "sft_train", "teacher"])
@pytest.mark.parametrize("kind", [WorkerDied, WorkerLate, WorkerAbandoned])
def test_lost_trainer_process_is_replaced(role: str, kind: type[WorkerFailed]) -> None:
    assert Restarts(1).wait_after(kind(role, 0, "the process died"), 1) == BACK_OFF_SECONDS[0]


@pytest.mark.parametrize(
    "failure",
    [
        WorkerFailed("actor_train", 0, "OutOfMemoryError: CUDA out of memory"),
        WorkerDied("actor_infer", 0, "the process died"),
        WorkerDied("rewards.math", 0, "the process died"),
    ],
)
def test_unrecoverable_failure_is_not_restarted(failure: WorkerFailed) -> None:
    counted = Restarts(3)
    with pytest.raises(WorkerFailed) as raised:
        counted.wait_after(failure, 4)
    assert raised.value is failure and counted.count == 0


def test_engine_dying_amid_restart_restarts_with_roles() -> None:
    counted = Restarts(3)
    counted.wait_after(LOST, 4)
    assert counted.wait_after(WorkerDied("actor_infer", 1, "the process died"), None) == BACK_OFF_SECONDS[1]
    with pytest.raises(WorkerFailed, match="memory"):
        counted.wait_after(EngineShortage("actor_infer", 1, "too little memory"), None)


def test_repeated_step_failure_or_spent_restarts_end_run() -> None:
    counted = Restarts(2)
    counted.wait_after(LOST, 4)
    with pytest.raises(WorkerDied, match=r"^actor_train rank 1: .*process 7 .*; step 4 failed again"):
        counted.wait_after(LOST, 4)
    counted.wait_after(LOST, 3)
    with pytest.raises(WorkerDied, match="restarted 2 times, .*max_restarts is 2$"):
        counted.wait_after(LOST, 5)
    with pytest.raises(WorkerDied) as raised:
        Restarts(0).wait_after(LOST, 1)
    assert raised.value is LOST


class Roles:
    """Stands in for the roles of a run."""

    def __init__(
        self, config: Config, plan: Plan, session: ClusterSession, stack: AsyncExitStack, early: Mapping[str, Any]
    ) -> None:
        self.have_started, self.ended, self.liveness = True, 0, self
        self.are_running = True
        self.all_groups: dict[str, Any] = {}

    @asynccontextmanager
    async def watched(self, is_awaited: Callable[[str], bool]) -> AsyncIterator[None]:
        yield

    async def end_trainer_side(self) -> None:
        self.ended += 1


class Run:
    """A loop of six steps with a checkpoint after every second one. `failures` has errors by (step, number of the
    attempt).
    """

    def __init__(self, failures: dict[tuple[int, int], RollError]) -> None:
        self.failures, self.taken, self.restarts = failures, dict.fromkeys(range(7), 0), 0
        self.roles: Roles | None = None

    async def loop(self, roles: Any, context: RunContext, interrupt: Interrupt) -> Position:
        self.roles, self.restarts = roles, context.restarts
        trainer = Trainer()
        position = await context.checkpointer.restore(trainer, trainer)
        assert trainer.step == position.step, "the trainer should have the weights of the checkpoint"
        for step in range(position.step + (position.step > 0), 7):
            self.taken[step] += 1
            if failure := self.failures.get((step, self.taken[step])):
                raise failure
            trainer.step, position = step, Position(step, step)
            context.tracker.log(step, {"run/restarts": context.restarts})
            if step:
                await context.checkpointer.save_if_due(position)
        return position


def finished(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch, *keys: str) -> list[tuple[int, int]]:
    """Run to the end, and return the step and the number of restarts in each line of metrics."""
    loaded: list[Config] = []
    words = [
        "--config-name",
        "tiny/tiny_warm_up",
        f"output_dir={folder}",
        "max_steps=6",
        "save_steps=2",
        "track_with=none",
        *keys,
    ]
    compose(words, lambda composed, presets: loaded.append(checked_config(composed, presets)))
    monkeypatch.setattr("roll.runs.roles.Roles", Roles)
    monkeypatch.setattr(restarts, "BACK_OFF_SECONDS", (limits.NONE,))
    session, (config,) = ClusterSession(folder, folder, folder), loaded
    life = quiet_life()
    with Interrupt() as interrupt, ExitStack() as stack:
        checkpointer = Checkpointer(config, CheckpointStore(folder / "checkpoints", keep=2))
        tracker = stack.enter_context(assemble.open_trackers(config, checkpointer.resumed_step, 6, life))
        context = RunContext(cast(Plan, None), session, checkpointer, tracker)
        reopen = partial(assemble._reopened, stack, config, 6, life)
        asyncio.run(assemble._run(config, run.loop, context, {}, interrupt, life, reopen))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["run/restarts"]) for line in lines]


def test_restarted_run_logs_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run({(1, 1): LOST, (5, 1): LOST})
    assert finished(tmp_path, run, monkeypatch) == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2)]
    assert run.taken == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1, 5: 2, 6: 1} and run.restarts == 2
    assert run.roles is not None and run.roles.ended == 2
    first, second = (message for message in caplog.messages if message.startswith(f"{LOST}; restart "))
    assert "restart 1 of 3: " in first and first.endswith("from its start")
    assert "restart 2 of 3: " in second and second.endswith("of step 4")
    assert (tmp_path / "export" / "weights").read_text() == "6"


def test_steps_after_the_checkpoint_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run({(4, 1): LOST})
    assert finished(tmp_path, run, monkeypatch) == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 1)]
    assert run.taken[3] == 2


def test_loss_amid_restart_is_not_blamed_on_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Anew(Run):
        async def loop(self, roles: Any, context: RunContext, interrupt: Interrupt) -> Position:
            roles.are_running = context.restarts != 1
            if not roles.are_running:
                raise LOST
            return await super().loop(roles, context, interrupt)

    run = Anew({(3, 1): LOST})
    assert finished(tmp_path, run, monkeypatch)[2:4] == [(2, 0), (3, 2)]
    with pytest.raises(WorkerDied, match="step 3 failed again"):
        finished(tmp_path / "again", Anew({(3, 1): LOST, (3, 2): LOST}), monkeypatch)


@pytest.mark.parametrize(
    ("failures", "keys", "said"),
    [
        ({(3, 1): LOST, (3, 2): LOST}, (), "step 3 failed again after a restart"),
        ({(3, 1): LOST}, ("max_restarts=0",), "is stopped"),
        ({(3, 1): BadInput(Fault("pretrain", "is gone", "bring it back", "not_found"))}, (), "is gone"),
    ],
)
def test_a_run_ends_with_what_would_fail_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failures: dict[tuple[int, int], RollError],
    keys: tuple[str, ...],
    said: str,
) -> None:
    with pytest.raises(RollError, match=said):
        finished(tmp_path, Run(failures), monkeypatch, *keys)


def test_roles_that_never_started_are_not_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run({(0, 1): LOST})
    monkeypatch.setattr(Roles, "have_started", property(lambda _: False, lambda *_: None), raising=False)
    with pytest.raises(WorkerDied):
        finished(tmp_path, run, monkeypatch)
    assert run.taken[0] == 1


def test_restart_ignores_checkpoints_of_an_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path, Run({}), monkeypatch)
    run = Run({(1, 1): LOST})
    assert finished(tmp_path, run, monkeypatch, "resume_from_checkpoint=never")[0] == (0, 1)
    assert run.taken[0] == 2
