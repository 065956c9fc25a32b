"""The interface of a pipeline's loop, and the objects that it receives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roll.config.plan.plan import Plan
from roll.ray.cluster import ClusterSession
from roll.runs.checkpointer import Checkpointer
from roll.runs.interrupt import Interrupt
from roll.runs.position import Position
from roll.tracking.fanout import Tracking
from roll.tracking.trace import Trace

if TYPE_CHECKING:
    from roll.runs.roles import Roles


@dataclass(frozen=True)
class RunContext:
    """Objects that every pipeline's loop needs."""

    plan: Plan
    session: ClusterSession
    checkpointer: Checkpointer
    tracker: Tracking
    restarts: int = 0
    """Number of restarts of the trainer's side in this run so far."""
    trace: Trace = field(default_factory=Trace)
    """Records who did what when."""


Loop = Callable[["Roles", RunContext, Interrupt], Awaitable[Position]]


@dataclass(frozen=True)
class PreparedRun:
    """A pipeline whose models and data have been checked."""

    loop: Loop
    """Runs the loop with the given roles and context."""
    identity: str
    """Fingerprint of the training rows and their order."""
    rows: int | None = None
    """Number of training rows if the run ends after `num_train_epochs` epochs; None if only `max_steps` ends it."""
