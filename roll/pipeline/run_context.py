"""The interface of a loop, and the objects that it is given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from roll.config.plan.plan import Plan
from roll.pipeline.checkpointer import Checkpointer
from roll.pipeline.interrupt import Interrupt
from roll.pipeline.position import Position
from roll.pipeline.roles import Roles
from roll.tracking.fanout import Tracking
from roll.workers.cluster import ClusterSession


@dataclass(frozen=True)
class RunContext:
    """The surroundings of a run, the same for every pipeline."""

    plan: Plan
    session: ClusterSession
    checkpointer: Checkpointer
    tracker: Tracking
    restarts: int = 0
    """Number of restarts of the trainer's side in this run so far."""


Loop = Callable[[Roles, RunContext, Interrupt], Awaitable[Position]]


@dataclass(frozen=True)
class Prepared:
    """A pipeline whose models and data are checked."""

    loop: Loop
    """Runs the loop in the given surroundings."""
    identity: str
    """Fingerprint of the rows to train on, which also depends on their order."""
    rows: int | None = None
    """Number of rows to train on, if the run ends after `num_train_epochs` passes over them; None if `max_steps` alone ends it."""
