"""The optimizer updates of a step: of the policy and, with `adv_estimator: gae`, of the critic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from roll.algorithms.losses import Loss
from roll.ray.device_sharing import run_together
from roll.runs.checkpointer import Trainer
from roll.runs.device_phases import DevicePhases
from roll.runs.position import Position
from roll.types import Metrics, TrainBatch

CRITIC_FOLDER = "critic"


class Learner(Protocol):
    """A role that learns: the policy or the critic."""

    async def train_step(self, batch: TrainBatch, loss: Loss, policy_version: int) -> Metrics:
        """Run all optimizer updates of a step. `policy_version` is the version before the updates."""
        ...


@dataclass(frozen=True)
class CriticLearning:
    """Settings of the critic's updates."""

    learner: Learner
    loss: Loss
    warmup: int
    """Number of initial steps in which only the critic learns. The policy does not change, but is synced again."""
    at_once: bool
    """Whether policy and critic learn concurrently, on separate devices. Otherwise the critic learns first."""


@dataclass(frozen=True)
class Learning:
    """Runs the updates of a step."""

    phases: DevicePhases
    policy: Learner
    loss: Loss
    updates: int
    critic: CriticLearning | None = None

    async def update(self, batch: TrainBatch, position: Position) -> tuple[Metrics, Position]:
        """Run the updates. Return their metrics and the position after the step."""
        version, critic = position.policy_version, self.critic
        policy_learns = critic is None or position.step >= critic.warmup
        parts: list[Metrics] = []
        if critic and critic.at_once:
            await self.phases.training("actor_train", "critic")
            policy = [self.policy.train_step(batch, self.loss, version)] if policy_learns else []
            parts += await run_together([critic.learner.train_step(batch, critic.loss, version), *policy])
        else:
            if critic:
                await self.phases.training("critic")
                parts.append(await critic.learner.train_step(batch, critic.loss, version))
            if policy_learns:
                await self.phases.training("actor_train")
                parts.append(await self.policy.train_step(batch, self.loss, version))
        metrics = {name: value for part in parts for name, value in part.items()}
        return metrics, Position(position.step + 1, version + (self.updates if policy_learns else 0))


class Restorable(Protocol):
    """A role with state in checkpoints."""

    async def save(self, folder: Path) -> None:
        """Write the training state, so that training continues exactly after `load`."""
        ...

    async def load(self, folder: Path) -> None:
        """Restore the training state that `save` wrote."""
        ...


@dataclass(frozen=True)
class OnloadedTrainer:
    """Implements `Trainer`: brings each role onto its devices before its state is written or read.

    The critic's state is in a subfolder. Only the policy is exported.
    """

    phases: DevicePhases
    role: str
    """Name of the policy's role."""
    policy: Trainer
    critic: Restorable | None = None

    async def save(self, folder: Path) -> None:
        """See `Trainer`."""
        await self.phases.checkpoint(self.role)
        await self.policy.save(folder)
        if self.critic:
            await self.phases.checkpoint("critic")
            await self.critic.save(folder / CRITIC_FOLDER)

    async def load(self, folder: Path) -> None:
        """See `Trainer`."""
        await self.phases.checkpoint(self.role)
        await self.policy.load(folder)
        if self.critic:
            await self.phases.checkpoint("critic")
            await self.critic.load(folder / CRITIC_FOLDER)

    async def export(self, folder: Path) -> None:
        """See `Trainer`."""
        await self.phases.checkpoint(self.role)
        await self.policy.export(folder)
