"""A run without engines, for processes that are killed.

Everything is real but the cluster, the roles and the data: the loss of each step follows from the weights, which are in
the checkpoints.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.plan import make_plan
from roll.config.schema.pipelines import Config
from roll.ray.cluster import ClusterSession
from roll.runs import assemble
from roll.runs.interrupt import Interrupt
from roll.runs.position import Position
from roll.runs.roles import Roles
from roll.runs.run_context import PreparedRun, RunContext
from roll.runs.stored import mirror
from roll.stores import lease
from roll.system.command import run_command
from tests import limits
from tests.quiet import quiet_life

STEPS = 6
FILLING = 100_000
"""Bytes that make a checkpoint take more than one packet."""


class Learner:
    """A trainer with one weight, and a source with a position."""

    def __init__(self) -> None:
        self.weight, self.position = 1.0, 0

    def step(self) -> float:
        self.position += 1
        self.weight = self.weight * 0.9 + 0.01 * self.position
        return self.weight

    async def save(self, folder: Path) -> None:
        (folder / "weights").write_text(f"{self.weight!r} " + "." * FILLING)
        (folder / "rank_0.pt").write_text("0")

    async def load(self, folder: Path) -> None:
        self.weight = float((folder / "weights").read_text().split()[0])

    async def export(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(repr(self.weight))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = int(state["position"])


@contextmanager
def no_cluster(folder: Path, *_: object) -> Iterator[ClusterSession]:
    yield ClusterSession(folder, folder / "logs", folder)


async def train(roles: Roles, context: RunContext, interrupt: Interrupt) -> Position:
    learner = Learner()
    position = await context.checkpointer.restore(learner, learner)
    while position.step < STEPS and not interrupt.happened():
        position = Position(position.step + 1, position.step + 1)
        context.tracker.log(position.step, {"sft/loss": learner.step(), "time/step": 0.5})
        await context.checkpointer.save_if_due(position)
    return position


def run(words: list[str]) -> None:
    keys = ["--config-name", "tiny/tiny_warm_up", f"max_steps={STEPS}", "save_steps=2", "dry_run=true", *words]
    loaded: list[Config] = []
    compose([*keys, "track_with=none"], lambda composed, presets: loaded.append(checked_config(composed, presets)))
    # A store that fails is given up at once, and a holder of the lease that has gone is noticed soon.
    mirror.PATIENCE, mirror.BACK_OFF = limits.EXPIRY, (limits.LOOK,)
    lease.BEAT, lease.SETTLE = limits.EXPIRY, limits.LOOK
    assemble.cluster = no_cluster
    assemble.early_groups = lambda config, plan, session: {}
    assemble.prepare_run = lambda config: PreparedRun(train, "rows", rows=4)
    assemble.last_step = lambda config, plan, prepared: STEPS
    assemble.run_experiment(loaded[0], make_plan(loaded[0]), quiet_life())


def run_apart(folder: Path, environment: Mapping[str, str], log: Path, words: list[str]) -> None:
    """Run in a process of its own, with its working directory, and its output in a file."""
    os.chdir(folder)
    os.environ |= environment
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    status = run_command(partial(run, words))
    sys.stdout.flush()
    os._exit(status)
